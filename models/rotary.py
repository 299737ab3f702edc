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
    frequency = rope.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    scaling = dict(rope.scaling)
    if rope.kind == "linear":
        frequency = frequency / scaling["factor"]
    elif rope.kind == "llama3":
        frequency = _llama3_frequency(frequency, scaling)
    elif rope.kind == "yarn":
        frequency = _yarn_frequency(frequency, rope.theta, scaling)
    angle = position.astype(jnp.float32)[:, None] * frequency[None, :]
    magnitude = scaling.get("attention_factor", 1.0)
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude


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
