"""A process with eight CPU devices that runs the same requests on models shared by several of them.

`python -m tests.support.sharded_process` reads a list of cases from stdin as JSON, {"size", "engine", "requests"}, and
prints a list of what each gave. Tests call `run_cases`. "collectives" lists kinds of programs whose collectives are
wanted; with "update" the weights are replaced at the end. "windows" gives each layer of the tiny model a sliding window
or none. A request may end with more fields of its `EngineRequest`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEVICES = 8


def run_cases(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the cases in a process of their own."""
    done = subprocess.run([sys.executable, "-m", "tests.support.sharded_process"], input=json.dumps(cases), cwd=ROOT,
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _run(case: dict[str, Any]) -> dict[str, Any]:
    import jax

    from jaxpaged.core.config import EngineConfig
    from jaxpaged.core.messages import EngineRequest
    from jaxpaged.core.sampling_params import SamplingParams
    from jaxpaged.engine.engine import Engine
    from jaxpaged.engine.in_memory import in_memory_model
    from tests.support.tiny_llama import load_with_windows

    lines: list[str] = []
    arguments = case["engine"]
    in_memory = None
    if "windows" in case:
        in_memory = in_memory_model(load_with_windows(Path(arguments["model"]), case["windows"]))
        arguments = arguments | {"model": "in-memory"}
    engine = Engine(EngineConfig.from_kwargs(tensor_parallel_size=case["size"], **arguments), lines.append,
                    model=in_memory)
    ids: dict[str, list[int]] = {}
    logprobs: dict[str, list[Any]] = {}
    for number, (prompt, params, count, *more) in enumerate(case["requests"]):
        bias = {int(token): value for token, value in params.pop("logit_bias", {}).items()} or None
        engine.add_request(EngineRequest(str(number), tuple(prompt), SamplingParams(logit_bias=bias, **params), count,
                                         seed=params.get("seed"), **(more[0] if more else {})))
    computed = 0
    while engine.has_work():
        outputs = engine.step()
        computed += sum(outputs.stats.step_tokens)
        for delta in outputs.deltas:
            assert delta.error is None, delta.error
            ids.setdefault(delta.request_id, []).extend(delta.token_ids)
            logprobs.setdefault(delta.request_id, []).extend(
                [item.logprob, item.rank, item.top] for item in delta.logprobs or ())
        engine.check_integrity()
    runner = engine._runner
    programs = runner._programs
    result = {
        "ids": [ids[str(number)] for number in range(len(case["requests"]))],
        "logprobs": [logprobs[str(number)] for number in range(len(case["requests"]))],
        "preemptions": engine.stats().num_preemptions,
        "swapped_in": engine.stats().blocks_swapped_in,
        "computed": computed,
        "compilations": [engine.stats().compilations, engine.info.num_programs],
        "plan": lines,
        "weights": _bytes_by_device(engine.params),
        "pools": _bytes_by_device(runner._pools),
        "shapes": jax.tree.map(lambda leaf: leaf.shape, engine.params),
        "collectives": {f"{kind} {size}": _collectives(programs.get((kind, size)).as_text() or "")
                        for kind, size in programs.names() if kind in case.get("collectives", ())},
    }
    if "update" in case:
        _check_updates(engine, case["engine"]["model"])
    engine.shutdown()
    return result


def _check_updates(engine: Any, model: str) -> None:
    """Weights as the checkpoint has them, or as the devices hold them, end up where the loaded ones were."""
    import jax
    import numpy as np

    from jaxpaged.loading.checkpoint import open_checkpoint
    from jaxpaged.loading.weights import load_params
    from jaxpaged.models.registry import find_family

    checkpoint, loaded, shapes = open_checkpoint(Path(model)), engine.params, engine._runner._stored
    family = find_family(checkpoint.config)
    stored = load_params(shapes, family.weights, checkpoint, config=family.config_from_hf(checkpoint.config),
                         ignored=family.ignored)
    for params in (stored, loaded, jax.tree.map(np.asarray, stored), jax.tree.map(np.asarray, loaded)):
        engine.update_weights(jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes))
        assert all(not leaf.any() for leaf in jax.tree.leaves(engine.params))
        engine.update_weights(params)
        jax.tree.map(np.testing.assert_array_equal, engine.params, loaded)


def _bytes_by_device(tree: Any) -> list[int]:
    import jax

    total: dict[int, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            total[shard.device.id] = total.get(shard.device.id, 0) + shard.data.nbytes
    return [total[device] for device in sorted(total)]


def _collectives(text: str) -> list[list[Any]]:
    """[kind, shape, name of the part of the sampler] of each."""
    from bench import gpu_code

    found = []
    for line in text.splitlines():
        name = re.search(r'op_name="[^"]*sampler_(\w+)', line)
        found += [[op.kind, op.shape, name[1] if name else ""] for op in gpu_code.array_ops(line) if op.kind != "copy"]
    return found


def main() -> None:
    """Run what stdin asks for."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    results = [_run(case) for case in json.load(sys.stdin)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
