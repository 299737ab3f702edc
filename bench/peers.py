"""One timed run of one engine over one workload, in a process of its own; `compare.py` starts these.

Each engine is loaded, warmed up by a short run, then timed over the whole workload: greedy, end tokens ignored, exactly
the wanted number of tokens for each request. The engines that are not jaxpaged get the float32 weights as a folder in
Hugging Face layout.
"""

import argparse
import copy
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import (
    Job,
    Workload,
    engine_arguments,
    generate,
    peak_memory_bytes,
    read_workload,
    short_jobs,
    static_batches,
)

Ids = list[list[int]]


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One engine over one workload; `ids` in the order of the requests."""

    load_s: float
    elapsed_s: float
    peak_memory_bytes: int
    ids: Ids


@dataclass(frozen=True, slots=True)
class Setting:
    """How to run: `weights` is a float32 folder in Hugging Face layout, `model` what the user named."""

    model: str
    weights: Path
    batch: int
    engine_flags: Sequence[str]

    @property
    def prefix_caching(self) -> bool:
        """Whether the peers that can should cache prefixes, by jaxpaged's flag."""
        return "--no-enable-prefix-caching" not in self.engine_flags


@contextmanager
def run_jaxpaged(setting: Setting) -> Iterator[Callable[[Sequence[Job]], Ids]]:
    import jaxpaged

    flags = ["--model", setting.model, *setting.engine_flags]
    with jaxpaged.LLM(**engine_arguments(flags, "compare.py")) as llm:
        yield lambda jobs: [list(output.outputs[0].token_ids) for output in generate(llm, jobs)]


@contextmanager
def run_transformers(setting: Setting) -> Iterator[Callable[[Sequence[Job]], Ids]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(setting.weights, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def run(jobs: Sequence[Job]) -> Ids:
        ids: Ids = [[] for _ in jobs]
        for batch in static_batches(jobs, setting.batch):
            width = max(len(jobs[index].prompt) for index in batch)
            rows = [(0,) * (width - len(jobs[index].prompt)) + jobs[index].prompt for index in batch]
            mask = [[0] * (width - len(jobs[index].prompt)) + [1] * len(jobs[index].prompt) for index in batch]
            with torch.inference_mode():
                out = model.generate(torch.tensor(rows), attention_mask=torch.tensor(mask), do_sample=False,
                                     max_new_tokens=max(jobs[index].output_len for index in batch))
            for index, row in zip(batch, out[:, width:].tolist(), strict=True):
                ids[index] = row[: jobs[index].output_len]
        return ids

    yield run


@contextmanager
def run_vllm(setting: Setting) -> Iterator[Callable[[Sequence[Job]], Ids]]:
    import vllm

    # Its default share is of all memory and is refused where other programs hold some; this is far more than it needs.
    llm = vllm.LLM(str(setting.weights), dtype="float32", skip_tokenizer_init=True, gpu_memory_utilization=0.4,
                   enable_prefix_caching=setting.prefix_caching)

    def run(jobs: Sequence[Job]) -> Ids:
        prompts = [{"prompt_token_ids": list(job.prompt)} for job in jobs]
        params = [vllm.SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True, detokenize=False)
                  for job in jobs]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    yield run


def _openvino_folder(weights: Path) -> Path:
    return weights.with_name("openvino")


def _export_to_openvino(weights: Path) -> None:
    """Once for all runs, and before the clock starts."""
    folder = _openvino_folder(weights)
    if not folder.exists():
        cli = str(Path(sys.executable).with_name("optimum-cli"))
        subprocess.run([cli, "export", "openvino", "--model", str(weights), "--task", "text-generation-with-past",
                        "--weight-format", "fp32", str(folder)], check=True, stdout=sys.stderr)


@contextmanager
def run_openvino(setting: Setting) -> Iterator[Callable[[Sequence[Job]], Ids]]:
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = setting.prefix_caching
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipe = genai.ContinuousBatchingPipeline(str(_openvino_folder(setting.weights)), scheduler, "CPU", precision)

    def run(jobs: Sequence[Job]) -> Ids:
        import numpy as np

        inputs = [openvino.Tensor(np.array([job.prompt], np.int64)) for job in jobs]
        configs = []
        for job in jobs:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = job.output_len, True, False
            configs.append(config)
        return [list(result.m_generation_ids[0]) for result in pipe.generate(inputs, configs)]

    yield run


@contextmanager
def run_llama_server(setting: Setting) -> Iterator[Callable[[Sequence[Job]], Ids]]:
    """llama.cpp's server on PATH, on the .gguf file as it is: quantized weights stay quantized."""
    import httpx

    url = "http://127.0.0.1:8177"
    slots = 16
    server = subprocess.Popen(["llama-server", "-m", setting.model, "--port", "8177", "-np", str(slots), "-cb",
                               "-c", str(slots * 1024)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = httpx.Client(base_url=url, timeout=None)
        while server.poll() is None:
            try:
                if client.get("/health").status_code == 200:
                    break
            except httpx.ConnectError:
                pass
            time.sleep(0.05)

        def ask(job: Job) -> list[int]:
            body = {"prompt": list(job.prompt), "n_predict": job.output_len, "temperature": 0, "ignore_eos": True,
                    "return_tokens": True, "cache_prompt": False}
            return list(client.post("/completion", json=body).raise_for_status().json()["tokens"])

        def run(jobs: Sequence[Job]) -> Ids:
            with ThreadPoolExecutor(len(jobs)) as pool:
                return list(pool.map(ask, jobs))

        yield run
    finally:
        server.terminate()
        server.wait()


# Name of the engine: how to run it, and what its Python must be able to import ("": a program on PATH instead).
ENGINES: dict[str, tuple[Any, str]] = {
    "transformers": (run_transformers, "transformers"),
    "jaxpaged": (run_jaxpaged, "jaxpaged"),
    "vllm": (run_vllm, "vllm"),
    "openvino": (run_openvino, "openvino_genai"),
    "llama.cpp": (run_llama_server, ""),
}


def measure(engine: str, workload: Workload, setting: Setting) -> PeerRun:
    """Load, warm up, run once."""
    if engine == "openvino":
        _export_to_openvino(setting.weights)
    begin = time.perf_counter()
    with ENGINES[engine][0](setting) as run:
        load = time.perf_counter() - begin
        run(short_jobs(workload.jobs, setting.batch))
        begin = time.perf_counter()
        ids = run(workload.jobs)
        elapsed = time.perf_counter() - begin
        peak = peak_memory_bytes()
    for job, row in zip(workload.jobs, ids, strict=True):
        assert len(row) == job.output_len, f"{engine} gave {len(row)} tokens where {job.output_len} were asked for"
    return PeerRun(load, elapsed, peak, ids)


def export_weights(model: Path, folder: Path) -> None:
    """Write a .gguf file as float32 in Hugging Face layout, dequantized by transformers itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # the loaded one refuses to be saved
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    args, engine_flags = parser.parse_known_args()
    workload = read_workload(args.workload, args.num_prompts)
    run = measure(args.engine, workload, Setting(args.model, args.weights, args.batch, engine_flags))
    args.out.write_text(json.dumps(dataclasses.asdict(run)))


if __name__ == "__main__":
    main()
