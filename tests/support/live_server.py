"""Starting the real server for a test, and a tiny model that it can serve within seconds."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_gguf import CONFIG, random_weights

ROOT = Path(__file__).resolve().parents[2]
CHAT_TEMPLATE = ("{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}"
                 "{% endif %}[{{ message.role }}]{{ message.content }}<|end|>{% endfor %}"
                 "{% if add_generation_prompt %}[assistant]{% endif %}")


def write_tiny_model(folder: Path, *, context: int = 4096) -> Path:
    """A Llama with random weights whose tokens are single bytes, in Hugging Face layout; it ends only by chance."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}))
    config = {**CONFIG, "vocab_size": 257, "max_position_embeddings": context, "eos_token_id": 256}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config), folder / "model.safetensors")
    return folder


def flags_of(args: Mapping[str, Any]) -> list[str]:
    """The command line's flags for arguments of an EngineConfig."""
    return [item for name, value in args.items() if value is not False
            for item in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))]


class LiveServer:
    """`python -m jaxpaged.server` in a process of its own, on a free port of the loopback interface.

    Args:
        log: file that takes its stderr.
        arguments: more flags.
        files: most files that each of its processes may have open; None for as many as this one.
    """

    def __init__(self, log: Path, *arguments: str, files: int | None = None) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jaxpaged.server", "--host", "127.0.0.1", "--port", "0", *arguments],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**os.environ, "COLUMNS": "200"})
        if files is not None:  # from outside: a function between fork and exec would fork a process full of threads
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (files, files))
        self.children: list[psutil.Process] = []

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text(errors="replace")

    def wait_ready(self, timeout: float = 300) -> Self:
        """Wait until it serves."""
        self.wait_for(lambda: "serving on" in self.log or self.process.poll() is not None, timeout)
        found = re.search(r"serving on (\S+)", self.log)
        assert found, self.log
        self.url = found[1]
        self.note_children()
        [self.engine] = [child for child in self.children if "jaxpaged-engine" in child.cmdline()]
        return self

    def note_children(self) -> None:
        """Remember the processes that it has started, for after its own end."""
        self.children = psutil.Process(self.process.pid).children()

    def wait_for(self, condition: Callable[[], object], timeout: float) -> float:
        """Wait until the condition holds; returns the seconds that took."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < timeout, f"not within {timeout} s; log:\n{self.log}"
            time.sleep(0.02)
        return time.monotonic() - start

    def client(self, timeout: float = 120) -> openai.OpenAI:
        """OpenAI's client for it, which does not try again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0, timeout=timeout)

    def metrics(self) -> dict[str, float]:
        """Sample name, with the finish reason if there is one, to value."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return {" ".join([sample.name, *([sample.labels["finished_reason"]]
                                         if "finished_reason" in sample.labels else [])]): sample.value
                for family in text_string_to_metric_families(text) for sample in family.samples
                if "le" not in sample.labels}

    def wait_idle(self, timeout: float) -> None:
        """Wait until the engine runs nothing and holds no block."""
        self.wait_for(self.is_idle, timeout)

    def is_idle(self) -> bool:
        """Whether the engine runs nothing and holds no block."""
        found = self.metrics()
        return not any(found[name] for name in (
            "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"))

    def stop(self, timeout: float = 60) -> int:
        """Ask it to end; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for process in [*self.children, psutil.Process(self.process.pid)] if self.process.poll() is None \
                else self.children:
            if process.is_running():
                process.kill()
        self.process.wait()
