"""Log probabilities of sampled tokens and their alternatives, without sorting the vocabulary.

On the device they are packed into one int32 array, so that reading them is one transfer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged.core.messages import TokenLogprobs
from jaxpaged.execution.vocab_shards import ONE_SHARD, VocabShards

NUM_TOP = 32  # minimum number of alternatives: a beam search of width 16 needs twice its width


BestTokens = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]  # see `best_tokens`


def packed_logprobs(
    logits: jax.Array, ids: jax.Array, num_top: int, shards: VocabShards = ONE_SHARD, best: BestTokens | None = None
) -> jax.Array:
    """Log probabilities of one token per row and of the row's best tokens.

    Args:
        logits: [B, V] float32; minus infinity is a probability of zero.
        ids: [B] int32, the sampled or given tokens.
        num_top: number of alternatives, at most V.
        shards: how devices share the logits.
        best: replaces `best_tokens`.

    Returns:
        [B, 2 + 2 * num_top] int32: logprob, rank, ids of the best, their logprobs; floats as their bits.
    """
    highest = shards.max("highest", jnp.max(logits, axis=-1, keepdims=True))
    mass = shards.sum("mass", jnp.sum(jnp.exp(logits - highest), axis=-1, keepdims=True))
    total = highest + jnp.log(mass)  # [B, 1]
    column = shards.column(logits, jnp.maximum(ids, 0))[:, None]
    here = jnp.take_along_axis(logits, column, axis=1, mode="fill", fill_value=0)
    chosen = shards.sum("chosen", here)
    rank = 1 + shards.sum("rank", jnp.sum(logits > chosen, axis=-1, keepdims=True, dtype=jnp.int32))
    values, top = best_tokens(logits, num_top, shards) if best is None else best(logits, num_top)
    return jnp.concatenate([_bits(chosen - total), rank, top, _bits(values - total)], axis=1)


def best_tokens(logits: jax.Array, count: int, shards: VocabShards = ONE_SHARD) -> tuple[jax.Array, jax.Array]:
    """The `count` largest logits of each row in order, and their ids: [B, count] float32 and int32."""
    values, ids = lax.top_k(logits, min(count, logits.shape[1]))
    ids = ids.astype(jnp.int32) + shards.first(logits)
    if shards.axis is not None:  # the best of each device's best, which are in the order of their ids
        values, index = lax.top_k(shards.gather("best", values), count)
        ids = jnp.take_along_axis(shards.gather("best", ids), index, axis=1)
    return values, ids


def packed_width(num_top: int) -> int:
    """Columns of what `packed_logprobs` returns."""
    return 2 + 2 * num_top


def unpack_row(row: np.ndarray, count: int) -> TokenLogprobs:
    """One row of `packed_logprobs` on the host, with its first `count` alternatives."""
    num_top = len(row) // 2 - 1
    floats: Any = row.view(np.float32)
    ids, values = row[2 : 2 + count].tolist(), floats[2 + num_top : 2 + num_top + count].tolist()
    return TokenLogprobs(float(floats[0]), int(row[1]), tuple(zip(ids, values, strict=True)))


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.int32)
