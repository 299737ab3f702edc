"""A process with eight CPU devices that makes engines on some of them.

`python -m tests.support.chosen_devices_process FOLDER [CASE ...]` reads the folder of the tiny model and prints, by the
name of each case, the devices of the weights, of the KV pool, and the greedy ids of a prompt; or the error.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PROMPT = list(range(7, 13))
# As few and small programs as can be: each device has its own.
SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 2, "num_gpu_blocks_override": 9,
                         "enforce_eager": True, "cpu_attention": "xla"}


def main(folder: str, *wanted: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    from jaxpaged import LLM, SamplingParams
    from tests.support.tiny_llama import load_with_windows

    devices = jax.devices()
    module, params = load_with_windows(Path(folder), [None, None])
    greedy = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
    open_llms = []

    def run(model: Any, **arguments: Any) -> dict[str, Any]:
        llm = LLM(model, **SMALL | arguments)
        open_llms.append(llm)  # all of them at once in one process
        engine = llm._engine
        assert engine is not None
        weights, pools = jax.tree.leaves(engine.params), jax.tree.leaves(engine._runner._pools)
        given = jax.tree.leaves(model[1]) if isinstance(model, tuple) else []
        first = [len(leaf.sharding.device_set) == 1 and leaf.unsafe_buffer_pointer()
                 for leaf in (*weights[:1], *given[:1])]
        return {"ids": list(llm.generate([PROMPT], greedy, use_tqdm=False)[0].outputs[0].token_ids),
                "weights": sorted({device.id for leaf in weights for device in leaf.sharding.device_set}),
                "pools": sorted({device.id for leaf in pools for device in leaf.sharding.device_set}),
                "copied": len(set(first)) == 2}

    def on(*indices: int) -> dict[Any, Any]:
        mesh = Mesh(np.array(devices)[list(indices)], ("x",))
        return dict(jax.device_put(params, NamedSharding(mesh, PartitionSpec())))

    def under_default() -> dict[str, Any]:
        with jax.default_device(devices[6]):
            return run(folder)

    def updated(**arguments: Any) -> dict[str, Any]:
        """From weights that a training mesh of four by two has, each leaf cut along its axes where they divide."""
        mesh = Mesh(np.array(devices).reshape(4, 2), ("fsdp", "tensor"))

        def spread(leaf: jax.Array) -> jax.Array:
            names = [name if size % mesh.shape[name] == 0 else None
                     for size, name in zip(leaf.shape, ("fsdp", "tensor"), strict=False)]
            return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*names)))

        training = jax.tree.map(spread, params)
        llm = LLM((module, jax.tree.map(np.zeros_like, params)), **SMALL | arguments)
        open_llms.append(llm)
        update = llm.update_weights(training, donate=True)
        assert llm._engine is not None
        weights = jax.tree.leaves(llm._engine.params)
        return {"ids": list(llm.generate([PROMPT], greedy, use_tqdm=False)[0].outputs[0].token_ids),
                "weights": sorted({device.id for leaf in weights for device in leaf.sharding.device_set}),
                "moved": update.bytes_copied, "freed": all(leaf.is_deleted() for leaf in jax.tree.leaves(training))}

    on_five = jax.device_put(params, devices[5])
    cases: dict[str, Callable[[], Any]] = {
        "plain": lambda: run(folder),
        "pair on 5": lambda: run((module, on_five)),
        "given 3": lambda: run(folder, devices=[devices[3]]),
        "pair on 5, given 2": lambda: run((module, on_five), devices=[devices[2]]),
        "default 6": under_default,
        "mesh of 7 and 4": lambda: run(folder, mesh=Mesh(np.array(devices)[[7, 4]], ("model",))),
        "sharded over 4 and 5": lambda: run((module, on(4, 5)), tensor_parallel_size=2),
        "over 4 and 5, on one": lambda: run((module, on(4, 5))),
        "trained, to 3": lambda: updated(devices=[devices[3]]),
        "trained, to 6 and 7": lambda: updated(devices=devices[6:]),
        "both": lambda: run(folder, devices=devices[:1], mesh=Mesh(np.array(devices), ("x",))),
        "contradicting": lambda: run(folder, devices=devices[:3], tensor_parallel_size=2),
        "twice": lambda: run(folder, devices=[devices[1]] * 2),
        "none": lambda: run(folder, devices=[]),
        "no devices": lambda: run(folder, devices=["cpu"]),
        "another platform": lambda: run(folder, devices=devices[:1], device="cuda"),
    }
    results = {}
    for name in wanted or cases:
        case = cases[name]
        try:
            results[name] = case()
        except ValueError as error:
            results[name] = str(error)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
