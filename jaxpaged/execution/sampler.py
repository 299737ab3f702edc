"""Draw the next token of each row, without sorting the vocabulary.

Cut-offs are found by building the threshold bit by bit: a float's bits, made order-preserving, are a 32-bit number, and
32 counting passes find the largest threshold that still selects enough. The draw is the Gumbel-max trick (Gumbel,
1954; Maddison et al., 2014), keyed by (seed, choice, position) alone, so it does not depend on the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from jaxpaged.core.messages import EngineRequest
from jaxpaged.execution.vocab_shards import ONE_SHARD, VocabShards
from jaxpaged.scheduling.scheduler_output import FAILED_TOKEN

Rows = jax.Array | np.ndarray  # one entry per row, on the device or still on the host

_LOW_HALF = 0xFFFFFFFF
_MIN_TOP_P = 1e-30
_MAX_TEMPERATURE = 1e30
_SHARED_BITS = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters on the device, one row per slot (or per sampled row, once gathered).

    Attributes:
        temperature, top_p, min_p: [rows] float32; temperature 0 is greedy.
        top_k: [rows] int32; 0 disables it.
        seed: [rows, 2] uint32, high and low half.
        choice: [rows] int32, index of the choice within its request.
        logprobs: [rows] bool, whether log probabilities are wanted.
        processed: [rows] bool, whether the slot's row of `ProcessorState` applies.
    """

    temperature: Rows
    top_k: Rows
    top_p: Rows
    min_p: Rows
    seed: Rows
    choice: Rows
    logprobs: Rows
    processed: Rows


def state_of(requests: Sequence[EngineRequest], rows: int) -> SamplingState:
    """Host arrays of these requests, whose seeds are resolved, padded with greedy rows to `rows`."""
    params = [request.params for request in requests]
    seeds = [request.seed or 0 for request in requests]

    def column(values: list[Any], padding: float, dtype: type[np.generic]) -> np.ndarray:
        return np.array([*values, *[padding] * (rows - len(values))], dtype)

    return SamplingState(
        temperature=column([0 if item.greedy else min(item.temperature, _MAX_TEMPERATURE) for item in params], 0,
                           np.float32),
        top_k=column([item.top_k if 0 < item.top_k < 2**31 else 0 for item in params], 0, np.int32),
        top_p=column([item.top_p for item in params], 1, np.float32),
        min_p=column([item.min_p for item in params], 0, np.float32),
        seed=np.stack([column([seed >> 32 & _LOW_HALF for seed in seeds], 0, np.uint32),
                       column([seed & _LOW_HALF for seed in seeds], 0, np.uint32)], axis=1),
        choice=column([request.choice for request in requests], 0, np.int32),
        logprobs=column([item.logprobs is not None for item in params], False, np.bool_),
        processed=column([item.has_processors for item in params], False, np.bool_),
    )


def sample(
    logits: jax.Array, state: SamplingState, position: jax.Array, shards: VocabShards = ONE_SHARD
) -> jax.Array:
    """Pick one token per row.

    Args:
        logits: [B, V] float32, or the part of it that this device has.
        state: the rows' parameters.
        position: [B] int32, the sequence position that the new token will have.
        shards: how devices share the logits.

    Returns:
        [B] int32; FAILED_TOKEN where a row's logits are not finite.
    """
    # XLA's maximum on CPU ignores NaN: replaced by plus infinity it is seen.
    highest = shards.max("highest", jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1))
    greedy = _first_index(logits, highest, shards)
    drawn = lax.cond(jnp.any(state.temperature > 0), partial(_draw, shards), lambda *_: greedy,
                     logits, state, position, highest)
    ids = jnp.where(state.temperature > 0, drawn, greedy)
    return jnp.where(jnp.isfinite(highest), ids, FAILED_TOKEN)


def _first_index(values: jax.Array, wanted: jax.Array, shards: VocabShards) -> jax.Array:
    """Smallest index of `wanted` in each row; two plain reductions, quicker on CPU than argmax."""
    index, last = shards.index(values), shards.size(values) - 1
    return shards.min("index", jnp.min(jnp.where(values == wanted[:, None], index, last), axis=-1))


def _draw(
    shards: VocabShards, logits: jax.Array, state: SamplingState, position: jax.Array, highest: jax.Array
) -> jax.Array:
    temperature = jnp.where(state.temperature > 0, state.temperature, 1)
    # With the maximum subtracted first, the best is exactly 0 at any temperature.
    scaled = (logits - highest[:, None]) / temperature[:, None]
    kept = keep_mask(scaled, state.top_k, state.top_p, state.min_p, shards, jnp.zeros_like(highest))
    keys = jax.vmap(_row_key)(state.seed, state.choice, position)
    noise = jax.vmap(_gumbel)(jax.random.key_data(keys), shards.index(scaled))
    perturbed = jnp.where(kept, scaled + noise, -jnp.inf)
    best = shards.max("drawn", jnp.max(perturbed, axis=-1))
    return _first_index(perturbed, best, shards)


def _gumbel(key: jax.Array, index: jax.Array) -> jax.Array:
    """Gumbel noise, a function of the key [2] and each index [V] alone: what `jax.random.gumbel` gives for all of V."""
    count = index.astype(jnp.uint32)
    high, low = threefry2x32_p.bind(key[0], key[1], jnp.zeros_like(count), count)
    mantissa = (high ^ low) >> 9 | jnp.uint32(0x3F800000)  # a float32 from 1 to 2
    uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))


def _row_key(seed: Rows, choice: Rows, position: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, choice), position)


def keep_mask(
    scaled: jax.Array, top_k: Rows, top_p: Rows, min_p: Rows, shards: VocabShards = ONE_SHARD,
    highest: jax.Array | None = None,
) -> jax.Array:
    """Which tokens survive min-p, then top-k, then top-p over the rest; all ties at a cut-off stay.

    Args:
        scaled: [B, V] logits after temperature.
        top_k, top_p, min_p: [B].
        shards: how devices share the logits.
        highest: [B] the rows' largest, if it is known.

    Returns:
        bool [B, V]; the most probable token always stays.
    """
    vocab = shards.size(scaled)
    if highest is None:
        highest = shards.max("highest", jnp.max(scaled, axis=-1))
    relative = scaled - highest[:, None]
    kept = relative >= jnp.log(min_p)[:, None]
    order = _ordered_bits(relative)

    def cut_top_k(kept: jax.Array) -> jax.Array:
        wanted = jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab)
        ones = jnp.ones_like(scaled)
        return kept & (order >= _threshold("top_k", order, ones, wanted.astype(jnp.float32), shards)[:, None])

    def cut_top_p(kept: jax.Array) -> jax.Array:
        mass = jnp.where(kept, jnp.exp(relative), 0)
        # The most probable token's mass is 1; a top_p that float32 rounds to zero must not count as no cut.
        total = shards.sum("mass", jnp.sum(mass, axis=-1))
        wanted = jnp.where(top_p < 1, jnp.maximum(top_p, _MIN_TOP_P) * total, 0)
        return kept & (order >= _threshold("top_p", order, mass, wanted, shards)[:, None])

    kept = lax.cond(jnp.any((top_k > 0) & (top_k < vocab)), cut_top_k, lambda same: same, kept)
    return lax.cond(jnp.any(top_p < 1), cut_top_p, lambda same: same, kept) | (relative == 0)


def _ordered_bits(values: jax.Array) -> jax.Array:
    """uint32 numbers in the same order as the float32 values."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(
    name: str, order: jax.Array, weight: jax.Array, wanted: jax.Array, shards: VocabShards
) -> jax.Array:
    """[B] uint32: the largest number t for which the weights of `order >= t` still sum up to `wanted`.

    `wanted` <= 0 cuts nothing. Devices that share the vocabulary find four bits in each pass instead of one: 8 sums of
    15 numbers per row cross between them instead of 32 of one.
    """
    bits = 1 if shards.axis is None else _SHARED_BITS

    def body(step: jax.Array, threshold: jax.Array) -> jax.Array:
        shift = (32 - bits - bits * step).astype(jnp.uint32)
        candidates = [threshold | (jnp.uint32(digit) << shift) for digit in range(1, 1 << bits)]
        sums = [jnp.sum(jnp.where(order >= candidate[:, None], weight, 0), axis=-1) for candidate in candidates]
        if shards.axis is None:
            return jnp.where((sums[0] >= wanted) & (wanted > 0), candidates[0], threshold)
        enough = (shards.sum(name, jnp.stack(sums, axis=1)) >= wanted[:, None]) & (wanted > 0)[:, None]
        return threshold | (jnp.sum(enough, axis=1, dtype=jnp.uint32) << shift)

    return lax.fori_loop(0, 32 // bits, body, jnp.zeros(order.shape[0], jnp.uint32))
