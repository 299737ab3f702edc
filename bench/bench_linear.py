"""The linear layers of one step alone, by tokens in the step: the floor that XLA's matrix products set.

    python bench/bench_linear.py

Random weights in the model's shapes, float32, no attention, the head on at most 32 rows; the first line is the time to
read all weights once.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from bench.common import print_table, write_json
from jaxpaged.config import DEFAULT_MODEL
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.hub import resolve_model
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.registry import find_family

SIZES = (1, 2, 8, 16, 32, 64, 128, 256)


def random_weights(config: ModelConfig) -> dict[str, Any]:
    """Every matrix of the model, [in, out]; the embedding [V, D]."""
    draw = np.random.default_rng(0).standard_normal
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"q": (config.model_dim, heads), "k": (config.model_dim, kv_heads), "v": (config.model_dim, kv_heads),
              "o": (heads, config.model_dim), "gate": (config.model_dim, config.mlp_dim),
              "up": (config.model_dim, config.mlp_dim), "down": (config.mlp_dim, config.model_dim)}
    layers = [{name: jnp.asarray(draw(shape, np.float32) * 0.02) for name, shape in shapes.items()}
              for _ in range(config.num_layers)]
    return {"layers": layers, "table": jnp.asarray(draw((config.vocab_size, config.model_dim), np.float32) * 0.02)}


def linear_layers(weights: dict[str, Any], x: jax.Array, config: ModelConfig) -> jax.Array:
    """All products of a step [T, D] -> logits [at most 32, V]; sums stand in for attention."""
    group = config.num_heads // config.num_kv_heads
    for layer in weights["layers"]:
        mixed = x @ layer["q"] + jnp.tile(x @ layer["k"] + x @ layer["v"], (1, group))
        x = x + mixed @ layer["o"]
        x = x + (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
    return jnp.einsum("td,vd->tv", x[:32], weights["table"])


def median_ms(call: Callable[[], Any], repeat: int = 7) -> float:
    """Median time of a call after one that is not counted."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    hf = open_checkpoint(resolve_model(args.model)).config
    config = find_family(hf).config_from_hf(hf)
    weights = random_weights(config)
    in_layers = sum(matrix.size for matrix in jax.tree.leaves(weights["layers"]))
    read = jax.jit(lambda tree: [leaf.reshape(8, -1).sum(1) for leaf in jax.tree.leaves(tree)])
    rows: list[list[object]] = [["read the weights", f"{median_ms(lambda: read(weights)):.1f}", ""]]
    for size in SIZES:
        step = jax.jit(lambda tree, x: linear_layers(tree, x, config))
        x = jnp.ones((size, config.model_dim), jnp.float32)
        ms = median_ms(lambda step=step, x=x: step(weights, x))  # type: ignore[misc]
        work = 2 * (in_layers * size + weights["table"].size * min(size, 32))
        rows.append([size, f"{ms:.1f}", f"{work / ms / 1e6:.0f}"])
    print_table(f"Linear layers of {config.num_layers} layers and the head", ["tokens", "ms", "GFLOP/s"], rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
