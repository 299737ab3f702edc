"""The linear layers of one step alone, by tokens in the step: on XLA, and in the native kernels in turn.

For whoever changes the native kernels.

    python bench/bench_linear.py

Random weights in the model's shapes, float32, no attention, the head on at most 32 rows; the first line is the time to
read all weights once.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.common import print_table, write_json
from jaxpaged.core.config import DEFAULT_MODEL
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.host_memory import HostArena
from jaxpaged.loading.hub import cache_dir, resolve_model
from jaxpaged.models.layers import use_native_products
from jaxpaged.models.mlp import DenseMLP
from jaxpaged.models.registry import find_family
from jaxpaged.models.transformer import Transformer
from jaxpaged.pallas_kernels import native_build, native_linear

SIZES = (1, 2, 8, 16, 32, 64, 128, 256)


def random_weights(shapes: dict[Any, Any]) -> dict[Any, Any]:
    """Arrays of these shapes, in huge pages like the engine's."""
    leaves = jax.tree.leaves(shapes)
    arena = HostArena(4 * sum(leaf.size for leaf in leaves), len(leaves))
    draw = np.random.default_rng(0)

    def weights(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        memory = arena.allocate(4 * leaf.size).view(np.float32).reshape(leaf.shape)
        draw.standard_normal(out=memory, dtype=np.float32)
        memory *= 0.02
        return jax.device_put(memory)

    return dict(jax.tree.map(weights, shapes))


def linear_layers(model: Transformer, x: jax.Array) -> jax.Array:
    """All products of a step [T, D] -> logits [at most 32, V]; sums replace attention."""
    for layer, spec in zip(model.layers, model.config.attention, strict=True):
        q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        q, k, v = jnp.split(layer.attn.qkv(x), (q_dim, q_dim + kv_dim), axis=1)
        x = layer.attn.o(q + jnp.tile(k + v, (1, q_dim // kv_dim)))
        assert isinstance(layer.mlp, DenseMLP), "the model has experts"
        x = layer.mlp(x)
    x = x[:32]
    return model.embed.logits(x) if model.head is None else model.head(x)


def medians_ms(calls: Sequence[Callable[[], Any]], repeat: int = 9) -> list[float]:
    """Median time of each of some calls, made in turn, after one that is not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        jax.block_until_ready(call())
    for _ in range(repeat):
        for call, seconds in zip(calls, times, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(call())
            seconds.append(time.perf_counter() - begin)
    return [1e3 * statistics.median(seconds) for seconds in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=SIZES, metavar="T", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    hf = open_checkpoint(resolve_model(args.model)).config
    family = find_family(hf)
    config = family.config_from_hf(hf)
    graph, state = nnx.split(nnx.eval_shape(lambda: family.build(config, jnp.dtype("float32"))))
    weights = random_weights(nnx.to_pure_dict(state))
    failure = native_build.build(cache_dir() / "native", [native_linear.KERNEL])

    def step(size: int, native: bool) -> Callable[[], Any]:
        def run(params: dict[Any, Any], x: jax.Array) -> jax.Array:
            model = nnx.merge(graph, params)
            if native:
                use_native_products(model)
            return linear_layers(model, x)

        program = jax.jit(run)
        x = jnp.ones((size, config.model_dim), jnp.float32)
        return lambda: program(weights, x)

    read = jax.jit(lambda tree: [leaf.reshape(8 if leaf.size % 8 == 0 else 1, -1).sum(1)
                                 for leaf in jax.tree.leaves(tree)])
    rows: list[list[object]] = [["read the weights", f"{medians_ms([lambda: read(weights)])[0]:.1f}", "", "", ""]]
    head = config.vocab_size * config.model_dim
    in_layers = sum(leaf.size for leaf in jax.tree.leaves(weights)) - head * (1 if config.tie_embeddings else 2)
    for size in args.tokens:
        times = medians_ms([step(size, native) for native in ((False,) if failure else (False, True))])
        work = 2 * (in_layers * size + head * min(size, 32))
        row: list[object] = [size]
        for ms in times:
            row += [f"{ms:.1f}", f"{work / ms / 1e6:.0f}"]
        rows.append([*row, *[""] * (5 - len(row))])
    print_table(f"Linear layers of {config.num_layers} layers and the head",
                ["tokens", "XLA ms", "GFLOP/s", "native ms", "GFLOP/s"], rows)
    if failure:
        print(f"no native kernel: {failure}")
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
