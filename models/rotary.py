"""Rotary position embedding (Su et al., 2021), and its scalings for long contexts.

Axis letters: T tokens, H head dim.
"""

import math

import jax
import jax.numpy as jnp

from jaxpaged.models.config import RopeConfig


def rotary_angles(position: jax.Array, head_dim: int, rope: RopeConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [T, H // 2] float32 of each token's rotary angles (Su et al., 2021).

    Angles come from integer positions in float32 whatever the weights' dtype: half precision cannot count to 2,049.
    """
    dims = rope.dims or head_dim
    frequency = _base(rope, dims) ** (-jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    scaling = dict(rope.scaling)
    if rope.kind == "linear":
        frequency = frequency / scaling["factor"]
    elif rope.kind == "llama3":
        frequency = _llama3_frequency(frequency, scaling)
    elif rope.kind == "yarn":
        frequency = _yarn_frequency(frequency, rope.theta, scaling)
    elif rope.kind == "longrope":
        is_long = rope.length > scaling["original_max_position_embeddings"]
        frequency = frequency / jnp.asarray(rope.long_factors if is_long else rope.short_factors, jnp.float32)
    angle = position.astype(jnp.float32)[:, None] * frequency[None, :]
    magnitude = scaling.get("attention_factor", 1.0)
    still = ((0, 0), (0, (head_dim - dims) // 2))  # pairs that nothing turns
    return (jnp.pad(jnp.cos(angle) * magnitude, still, constant_values=1), jnp.pad(jnp.sin(angle) * magnitude, still))


def _base(rope: RopeConfig, dims: int) -> float:
    """The base frequency; dynamic scaling makes it larger for longer texts, and the same for all that are served."""
    if rope.kind != "dynamic":
        return rope.theta
    scaling = dict(rope.scaling)
    factor, context = scaling["factor"], scaling["max_position_embeddings"]
    growth = factor * max(rope.length, context) / context - (factor - 1)
    return float(rope.theta * growth ** (dims / (dims - 2)))


def head_order(head_dim: int, rope: RopeConfig | None) -> tuple[int, ...] | None:
    """Where each of a head's H numbers lies in the checkpoint; None: in the same place.

    Here the two numbers of a pair lie H / 2 apart, and those that are not rotated come after the others in each half.
    Scores are the same in any order that queries and keys share.
    """
    if rope is None or not (rope.neighbors or (rope.dims or head_dim) < head_dim):
        return None
    dims = rope.dims or head_dim
    still = tuple(range(dims, head_dim))
    first, second = (range(0, dims, 2), range(1, dims, 2)) if rope.neighbors else (
        range(dims // 2), range(dims // 2, dims))
    return (*first, *still[: len(still) // 2], *second, *still[len(still) // 2 :])


def _llama3_frequency(frequency: jax.Array, scaling: dict[str, float]) -> jax.Array:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * jnp.pi)
    smooth = jnp.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn_frequency(frequency: jax.Array, theta: float, scaling: dict[str, float]) -> jax.Array:
    """Slow frequencies divided by the factor, fast ones as they are, a ramp between (YaRN; Peng et al., 2023)."""
    size = 2 * len(frequency)

    def pair(turns: float) -> float:
        """The pair that turns so often in the original context."""
        context = scaling["original_max_position_embeddings"]
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling["beta_fast"]), pair(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    slow = jnp.clip((jnp.arange(len(frequency)) - low) / (high - low or 1e-3), 0, 1)
    return slow * frequency / scaling["factor"] + (1 - slow) * frequency


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply rotary angles [T, H // 2] to x [T, heads, H]; first and second half of H form the pairs."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
