"""Changes to the logits that a request asks for: penalties, biases, banned tokens.

Their state lives on the device, one row per slot, written when a request is admitted to its slot: from then on a step
transfers nothing for them. Only requests with processors write their row; in other slots it is stale and ignored.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from jaxpaged.execution.vocab_shards import ONE_SHARD, VocabShards

Rows = Any  # a numpy array on the host, a jax.Array on the device

_NO_TOKEN = -1
_ALL = np.uint32(0xFFFFFFFF)
# A bias of 100 forces the token, one of -100 bans it, at any useful temperature.
_FORCE, _BAN = 1e4, -np.inf
_MAX_REPETITION = 1e20  # beyond it logits would leave float32's range


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProcessorState:
    """Rows of what changes the logits; V tokens, W = ceil(V / 32) words of a bit per token.

    Attributes:
        repetition, presence, frequency: [rows] float32, the penalties.
        counts: [rows, V] int32, twice how often a token is in the output, plus one if it is in the prompt.
        bias_id: [rows, MAX_LOGIT_BIAS] int32, V where there is no entry.
        bias: [rows, MAX_LOGIT_BIAS] float32.
        allowed: [rows, W] uint32, allowed tokens.
        early_banned: [rows, W] uint32, tokens that are banned before position `banned_until`.
        banned_until: [rows] int32.
        bad_words: [rows, 2 * MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS] int32, aligned to the right, -1 before them.
        recent: [rows, MAX_BAD_WORD_TOKENS - 1] int32, the last output tokens, -1 before them.
    """

    repetition: Rows
    presence: Rows
    frequency: Rows
    counts: Rows
    bias_id: Rows
    bias: Rows
    allowed: Rows
    early_banned: Rows
    banned_until: Rows
    bad_words: Rows
    recent: Rows


def neutral_allowed(rows: int, vocab_size: int) -> np.ndarray:
    """uint32 [rows, W]: every token is allowed."""
    return np.full((rows, -(-vocab_size // 32)), _ALL, np.uint32)


def neutral_processors(rows: int, vocab_size: int) -> ProcessorState:
    """Rows that change nothing."""
    words = -(-vocab_size // 32)
    return ProcessorState(
        repetition=np.ones(rows, np.float32),
        presence=np.zeros(rows, np.float32),
        frequency=np.zeros(rows, np.float32),
        counts=np.zeros((rows, vocab_size), np.int32),
        bias_id=np.full((rows, MAX_LOGIT_BIAS), vocab_size, np.int32),
        bias=np.zeros((rows, MAX_LOGIT_BIAS), np.float32),
        allowed=neutral_allowed(rows, vocab_size),
        early_banned=np.zeros((rows, words), np.uint32),
        banned_until=np.zeros(rows, np.int32),
        bad_words=np.full((rows, 2 * MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), _NO_TOKEN, np.int32),
        recent=np.full((rows, MAX_BAD_WORD_TOKENS - 1), _NO_TOKEN, np.int32),
    )


def processors_of(
    request: EngineRequest, prompt_ids: Sequence[int], output_ids: Sequence[int], vocab_size: int
) -> ProcessorState:
    """The row [1, ...] of a request that has these tokens, as the steps until now would have left it."""
    params, row = request.params, neutral_processors(1, vocab_size)
    row.repetition[0] = np.clip(params.repetition_penalty, 1 / _MAX_REPETITION, _MAX_REPETITION)
    row.presence[0], row.frequency[0] = params.presence_penalty, params.frequency_penalty
    if params.has_penalties:
        output = np.bincount(np.asarray(output_ids, np.int64), minlength=vocab_size)
        row.counts[0] = 2 * output[:vocab_size]
        row.counts[0, list(set(prompt_ids))] += 1
    for index, (token, bias) in enumerate((params.logit_bias or {}).items()):
        row.bias_id[0, index] = token
        row.bias[0, index] = _BAN if bias <= -100 else _FORCE if bias >= 100 else bias
    if params.allowed_token_ids is not None:
        row.allowed[0] = token_bits(params.allowed_token_ids, vocab_size)
    single = [word[0] for word in request.bad_word_ids if len(word) == 1]
    row.allowed[0] &= ~token_bits(single, vocab_size)
    longer = [word for word in request.bad_word_ids if len(word) > 1]
    for index, word in enumerate(longer):
        row.bad_words[0, index, -len(word):] = word
    recent = output_ids[-(MAX_BAD_WORD_TOKENS - 1):]
    if longer and recent:
        row.recent[0, -len(recent):] = recent
    if params.min_tokens:
        row.early_banned[0] = token_bits(request.stop_token_ids, vocab_size)
        row.banned_until[0] = len(prompt_ids) + params.min_tokens
    return row


def process_logits(
    logits: jax.Array, state: ProcessorState, slot: jax.Array, active: jax.Array, position: jax.Array,
    step_allowed: jax.Array, shards: VocabShards = ONE_SHARD, *, branches: bool = True,
) -> jax.Array:
    """The logits that are drawn from; minus infinity for banned tokens.

    Penalties are those of OpenAI (presence, frequency: on the output) and of CTRL (Keskar et al., 2019; repetition: on
    prompt and output). They are applied first, then biases, then bans.

    Args:
        logits: [B, V] float32.
        state: of all slots.
        slot: [B] int32.
        active: [B] bool, whether the slot's row counts.
        position: [B] int32, that the new token will have.
        step_allowed: [B, W] uint32, tokens allowed in this step, whatever `active` says.
        shards: how devices share the logits, and the counts with them.
        branches: skip what no row asks for. On a GPU each branch would cut the program's CUDA graph in two.
    """
    rows, vocab = jnp.arange(logits.shape[0])[:, None], logits.shape[1]
    repetition = jnp.where(active, state.repetition[slot], 1)
    presence = jnp.where(active, state.presence[slot], 0)
    frequency = jnp.where(active, state.frequency[slot], 0)
    bias_id = jnp.where(active[:, None], shards.column(logits, state.bias_id[slot]), vocab)
    last = jnp.where(active[:, None], state.bad_words[slot, :, -1], _NO_TOKEN)
    early = jnp.where((position < state.banned_until[slot])[:, None], state.early_banned[slot], 0)
    bits = step_allowed & jnp.where(active[:, None], state.allowed[slot] & ~early, _ALL)

    def penalize(logits: jax.Array) -> jax.Array:
        counts = state.counts[slot]
        output = counts >> 1
        factor = jnp.where(counts > 0, repetition[:, None], 1)
        logits = jnp.where(logits > 0, logits / factor, logits * factor)
        return logits - frequency[:, None] * output - presence[:, None] * (output > 0)

    def add_bias(logits: jax.Array) -> jax.Array:
        return logits.at[rows, bias_id].add(state.bias[slot], mode="drop")

    def ban_words(logits: jax.Array) -> jax.Array:
        before, recent = state.bad_words[slot, :, :-1], state.recent[slot]
        complete = jnp.all((before == _NO_TOKEN) | (before == recent[:, None, :]), axis=-1) & (last >= 0)
        return logits.at[rows, jnp.where(complete, shards.column(logits, last), vocab)].set(-jnp.inf, mode="drop")

    def ban_tokens(logits: jax.Array) -> jax.Array:
        spread = bits[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
        here = lax.dynamic_slice_in_dim(spread.reshape(bits.shape[0], -1), shards.first(logits), vocab, axis=1)
        return jnp.where(here == 1, logits, -jnp.inf)

    for wanted, change in (
        (jnp.any((repetition != 1) | (presence != 0) | (frequency != 0)), penalize),
        (jnp.any(bias_id < vocab), add_bias),
        (jnp.any(last >= 0), ban_words),
        (jnp.any(bits != _ALL), ban_tokens),
    ):
        logits = lax.cond(wanted, change, lambda same: same, logits) if branches else change(logits)
    return logits


def note_tokens(
    state: ProcessorState, slot: jax.Array, active: jax.Array, ids: jax.Array, shards: VocabShards = ONE_SHARD
) -> ProcessorState:
    """The state after these ids [B] have been drawn; negative ids count as none."""
    target = jnp.where(active & (ids >= 0), slot, state.recent.shape[0])  # beyond the end: dropped
    shifted = jnp.concatenate([state.recent[slot, 1:], ids[:, None]], axis=1)
    return replace(
        state,
        counts=state.counts.at[target, shards.column(state.counts, jnp.maximum(ids, 0))].add(2, mode="drop"),
        recent=state.recent.at[target].set(shifted, mode="drop"),
    )


def token_bits(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """uint32 [W] with the bits of these ids set; ids outside the vocabulary are left out."""
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    valid = np.fromiter((token for token in ids if token < vocab_size), np.int64)
    np.bitwise_or.at(bits, valid >> 5, np.uint32(1) << (valid & 31).astype(np.uint32))
    return bits
