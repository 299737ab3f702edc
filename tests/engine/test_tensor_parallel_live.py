"""The server and `LLM` with a model shared by two CPU devices: as a user starts them, against float64.

The pool is so small that requests are swapped out and back; choices share blocks until they write to them.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import pre_tokenizers

from tests.support.live_server import ROOT, LiveServer, flags_of
from tests.support.tiny_llama import CONFIG, EOS, Reference, random_weights, write_model

FLAGS: dict[str, Any] = {"tensor_parallel_size": 2, "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 8,
                         "num_gpu_blocks_override": 11, "swap_space": "0.01", "preemption_mode": "swap",
                         "enforce_eager": True}  # compiled as far as it is used
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # the tokens, in the order of their ids
REFERENCE = Reference(CONFIG, random_weights())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("shared") / "model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    with LiveServer(model.parent / "log", str(model), "--served-model-name", "m", *flags_of(FLAGS)) as live:
        yield live.wait_ready()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with server.client() as found:
        yield found


def chat(client: openai.OpenAI, text: str, **more: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True, **more.pop("extra_body", {})}
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], temperature=0,
                                          extra_body=extra, **more)


def test_many_chats_at_once(server: LiveServer, client: openai.OpenAI) -> None:
    """More than the pool holds: some wait in host memory, and no request's tokens change."""
    assert "on each of 2 devices" in server.log
    before = server.metrics()
    texts = [f"{number} " + "and so on " * (number % 3 + 1) for number in range(6)]
    with ThreadPoolExecutor(len(texts)) as threads:
        answers = list(threads.map(lambda text: chat(client, text, max_tokens=48), texts))
    for answer in answers:
        [choice] = answer.choices
        assert REFERENCE.error(answer.prompt_token_ids, choice.token_ids, 48) is None
        assert choice.finish_reason == "length"
    assert server.metrics()["vllm:num_preemptions_total"] > before["vllm:num_preemptions_total"]
    server.wait_idle(10)


def test_choices_and_a_prefix_share_blocks(server: LiveServer, client: openai.OpenAI) -> None:
    """Choices fork in the middle of a block, which each copies before it writes; a second chat finds the first's."""
    text = "a prompt that many will begin with: "
    for again in (False, True):
        answer = chat(client, text + "x" * again, n=3, max_tokens=20)
        assert len(answer.choices) == 3 and len(answer.prompt_token_ids) % 16
        for choice in answer.choices:
            assert REFERENCE.error(answer.prompt_token_ids, choice.token_ids, 20) is None
        assert (answer.usage.prompt_tokens_details.cached_tokens >= 32) == again


def test_structured_output(client: openai.OpenAI) -> None:
    """The mask lies across both devices: the best of what is allowed, one token after another."""
    answer = chat(client, "Say it.", max_tokens=12, extra_body={"structured_outputs": {"regex": "[ay~]{9}"}})
    [choice] = answer.choices
    tokens, allowed = list(answer.prompt_token_ids), [ALPHABET.index(char) for char in "ay~"]
    for token in choice.token_ids[:9]:
        logits = REFERENCE.logits(tokens)[-1][allowed]
        best = np.sort(logits)
        assert token == allowed[int(logits.argmax())] or best[-1] - best[-2] < 1e-3
        tokens.append(token)
    assert len(choice.message.content) == 9 and set(choice.message.content) <= set("ay~")
    assert choice.finish_reason == "stop"


_SCRIPT = """
import json, sys
from jaxpaged import LLM, SamplingParams
prompts, flags = json.load(sys.stdin)
with LLM(**flags) as llm:
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0, max_tokens=24))
    print(json.dumps([list(output.outputs[0].token_ids) for output in found]))
"""


def test_the_python_api(model: Path) -> None:
    """A script without a setting for devices."""
    prompts = [np.random.default_rng(seed).integers(0, EOS, 30).tolist() for seed in range(3)]
    done = subprocess.run([sys.executable, "-c", _SCRIPT], input=json.dumps([prompts, {"model": str(model), **FLAGS}]),
                          cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    for prompt, ids in zip(prompts, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert REFERENCE.error(prompt, ids, 24) is None
