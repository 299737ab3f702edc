"""The CPU time of a step on the engine's thread: schedule, build, dispatch and postprocess, with a tiny model.

For whoever changes the engine's loop or the scheduler. Times are CPU seconds of that thread alone, so that neither
waiting for the device nor other programs count. `send` is
what the server adds: packing a step's outputs for the HTTP process. Flags that are not this script's are the server's.
"""

import argparse
import gc
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import engine_arguments, print_table, write_json

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 16,
    "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
}
PARTS = ("schedule", "dispatch", "update_from_output")
PROMPT_TOKENS = 16


@dataclass
class Clock:
    """CPU seconds of this thread inside some methods of the engine, by name."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def around(self, instance: Any, name: str) -> None:
        """Count the time of `instance.name` from now on."""
        call: Callable[..., Any] = getattr(instance, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - began

        setattr(instance, name, timed)


def make_engine(arguments: dict[str, Any], windows: Sequence[int]) -> Any:
    """An engine of a tiny model with random weights, and layers with these windows; 0 for none."""
    import jax.numpy as jnp
    from flax import nnx

    from jaxpaged.core.config import EngineConfig
    from jaxpaged.engine.engine import Engine
    from jaxpaged.engine.in_memory import InMemoryModel
    from jaxpaged.models.registry import find_family

    family = find_family(TINY)
    shape = family.config_from_hf(TINY | {"num_hidden_layers": len(windows)})
    layers = tuple(replace(layer, mixer=mixer.of_layer(mixer.rope, window or None))
                   for layer, mixer, window in zip(shape.layers, shape.attention, windows, strict=True))
    module = family.build(shape.replace(layers=layers), jnp.float32, 0)
    config = EngineConfig(**({"max_num_seqs": 256, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 16_384,
                              "max_model_len": 1024, "max_waiting_requests": 100_000} | arguments))
    return Engine(config, model=InMemoryModel(module, nnx.to_pure_dict(nnx.state(module))))


def measure(engine: Any, clock: Clock, running: int, waiting: int, steps: int) -> dict[str, Any]:
    """Figures of `steps` steps with these numbers of running (decoding) and waiting requests; milliseconds per step."""
    from jaxpaged.core.messages import EngineRequest
    from jaxpaged.core.sampling_params import SamplingParams

    params = SamplingParams(temperature=0)
    began = time.thread_time()
    for number in range(running + waiting):
        prompt = tuple((number * 31 + index) % 500 for index in range(PROMPT_TOKENS))
        engine.add_request(EngineRequest(f"request-{number}", prompt, params, steps + 200, seed=1))
    adding = (time.thread_time() - began) / (running + waiting)
    while engine.step().stats.num_running < running:
        pass
    for _ in range(10):
        outputs = engine.step()
    idle = outputs.stats.device_idle_seconds
    clock.seconds = dict.fromkeys(PARTS, 0.0)
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        outputs = engine.step()
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    assert outputs.stats.num_running == running, "requests ended while they were measured"
    began = time.thread_time()
    for _ in range(steps):
        pickle.dumps(outputs, pickle.HIGHEST_PROTOCOL)
    send = time.thread_time() - began
    found = {"running": running, "waiting": waiting, "add_us": adding * 1e6, "step_ms": cpu / steps * 1e3,
             **{f"{part}_ms": seconds / steps * 1e3 for part, seconds in clock.seconds.items()},
             "send_ms": send / steps * 1e3, "wall_ms": wall / steps * 1e3,
             "device_idle": (outputs.stats.device_idle_seconds - idle) / wall}
    engine.abort([f"request-{number}" for number in range(running + waiting)])
    while engine.has_work():
        engine.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--running", type=int, nargs="+", default=[32, 64, 128, 256], metavar="N")
    parser.add_argument("--waiting", type=int, nargs="+", default=[1, 64, 1024, 4096], metavar="N",
                        help="besides the largest number of running requests, which take all slots")
    parser.add_argument("--steps", type=int, default=200, metavar="N")
    parser.add_argument("--windows", type=int, nargs="+", default=[0], metavar="N",
                        help="the sliding window of each layer of the model, 0 for none (default: one layer without); "
                             "layers with equal ones form a KV group")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args, engine_flags = parser.parse_known_args()
    max_running = max(args.running)
    engine = make_engine({"max_num_seqs": max_running, **engine_arguments(engine_flags, parser.prog)}, args.windows)
    clock = Clock()
    clock.around(engine._scheduler, "schedule")
    clock.around(engine._runner, "dispatch")
    clock.around(engine._scheduler, "update_from_output")
    cases = [*((running, 0) for running in sorted(args.running)), *((max_running, waiting) for waiting in args.waiting)]
    measure(engine, clock, max_running, 0, 10)
    gc.collect()
    gc.freeze()  # as the server does
    found = [measure(engine, clock, running, waiting, args.steps) for running, waiting in cases]
    print_table(
        f"CPU time of the engine's thread, {args.steps} steps each",
        ["running", "waiting", "ms/step", "us/request", *PARTS, "rest", "send", "wall ms/step", "device idle",
         "us to add one"],
        [[item["running"], item["waiting"], f"{item['step_ms']:.2f}", f"{item['step_ms'] / item['running'] * 1e3:.1f}",
          *(f"{item[f'{part}_ms']:.2f}" for part in PARTS),
          f"{item['step_ms'] - sum(item[f'{part}_ms'] for part in PARTS):.2f}", f"{item['send_ms']:.2f}",
          f"{item['wall_ms']:.2f}", f"{item['device_idle']:.0%}", f"{item['add_us']:.1f}"] for item in found])
    write_json(args.json, found)


if __name__ == "__main__":
    main()
