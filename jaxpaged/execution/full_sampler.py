"""The full variant of the sampler: features that only some requests use, so that other batches do not pay for them."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.execution.logit_processors import ProcessorState, note_tokens, process_logits
from jaxpaged.execution.logprobs import packed_logprobs, packed_width
from jaxpaged.execution.sampler import SamplingState, keep_mask, sample
from jaxpaged.execution.vocab_shards import ONE_SHARD, VocabShards
from jaxpaged.pallas_kernels.lowering import GpuTarget
from jaxpaged.pallas_kernels.sampler import SlotParameters, sample_with_cutoff
from jaxpaged.pallas_kernels.sampler import sample as sample_in_kernel
from jaxpaged.pallas_kernels.top_tokens import top_tokens
from jaxpaged.scheduling.scheduler_output import FAILED_TOKEN, NO_TOKEN_LEFT


def sample_full(
    logits: jax.Array, state: SamplingState, processors: ProcessorState, slot: jax.Array, position: jax.Array,
    step_allowed: jax.Array, *, num_top: int, processed_logprobs: bool,
    shards: VocabShards = ONE_SHARD,
) -> tuple[jax.Array, ProcessorState, jax.Array]:
    """Pick one token per row and return its log probability.

    Args:
        logits: [B, V] float32.
        state: the rows' parameters.
        processors: of all slots.
        slot: [B] int32, the rows' slots.
        position: [B] int32, the sequence position that the new token will have.
        step_allowed: [B, W] uint32, tokens allowed in this step, a bit for each.
        num_top: alternatives to report, see `packed_logprobs`.
        processed_logprobs: log probabilities after all processing, not of the model's own logits.
        shards: how devices share the logits.

    Returns:
        Ids [B] as `sample` gives them, or NO_TOKEN_LEFT; the processors' state after them; and `packed_logprobs`
        [B, 2 + 2 * num_top], zeros if no row wants them.
    """
    active = jnp.asarray(state.processed)
    processed = process_logits(logits, processors, slot, active, position, step_allowed, shards)
    ids = sample(processed, state, position, shards)
    failed = ids == FAILED_TOKEN
    # A row whose logits were finite before bans were applied is at a dead end, not broken.
    sound = lax.cond(jnp.any(failed), lambda: _is_distribution(logits, shards), lambda: failed)
    ids = jnp.where(failed & sound, NO_TOKEN_LEFT, ids)

    def report() -> jax.Array:
        reported = _drawn_from(processed, state, shards) if processed_logprobs else logits
        return packed_logprobs(reported, ids, num_top, shards)

    nothing = jnp.zeros((logits.shape[0], packed_width(num_top)), jnp.int32)
    return (ids, note_tokens(processors, slot, active, ids, shards),
            lax.cond(jnp.any(state.logprobs), report, lambda: nothing))


def sample_full_in_kernels(
    logits: jax.Array, state: SamplingState, processors: ProcessorState, last_id: jax.Array, slot: jax.Array,
    position: jax.Array, step_allowed: jax.Array, *, num_top: int, processed_logprobs: bool, target: GpuTarget,
) -> tuple[jax.Array, ProcessorState, jax.Array, jax.Array]:
    """As `sample_full`, for a GPU: without sorts, loops and branches, which would split its CUDA graph.

    Args:
        state: of all slots, as `processors`.
        last_id: [slots] int32.

    Returns:
        Ids, the processors' state, `last_id` with the ids at their slots, and `packed_logprobs`, zeros in rows that do
        not want them.
    """
    active, wanted = jnp.asarray(state.processed)[slot], jnp.asarray(state.logprobs)[slot]
    processed = process_logits(logits, processors, slot, active, position, step_allowed, branches=False)
    parameters = SlotParameters(*(jnp.asarray(getattr(state, name)) for name in SlotParameters._fields))
    reported = logits
    if processed_logprobs:
        ids, last_id, lowest = sample_with_cutoff(processed, parameters, slot, position, last_id, target=target)
        temperature = parameters.temperature[slot]
        scaled = processed / jnp.where(temperature > 0, temperature, 1)[:, None]
        reported = jnp.where(processed >= lowest[:, None], scaled, -jnp.inf)
    else:
        ids, last_id = sample_in_kernel(processed, parameters, slot, position, last_id, target=target)
    ids = jnp.where((ids == FAILED_TOKEN) & _is_distribution(logits, ONE_SHARD), NO_TOKEN_LEFT, ids)
    packed = packed_logprobs(reported, ids, num_top, best=partial(top_tokens, wanted=wanted, target=target))
    return ids, note_tokens(processors, slot, active, ids), last_id, jnp.where(wanted[:, None], packed, 0)


def _is_distribution(logits: jax.Array, shards: VocabShards) -> jax.Array:
    """[B] whether a row is a distribution: some logit is finite, and none is NaN or plus infinity."""
    finite = jnp.any(jnp.isfinite(logits), axis=-1)
    broken = jnp.any(jnp.isnan(logits) | (logits == jnp.inf), axis=-1)
    counts = shards.sum("sound", jnp.stack([finite, broken], axis=1).astype(jnp.int32))
    return (counts[:, 0] > 0) & (counts[:, 1] == 0)


def _drawn_from(logits: jax.Array, state: SamplingState, shards: VocabShards) -> jax.Array:
    """The logits after temperature and cuts; those of greedy rows as they are."""
    draws = (state.temperature > 0)[:, None]
    scaled = logits / jnp.where(draws, state.temperature[:, None], 1)
    kept = keep_mask(scaled, state.top_k, state.top_p, state.min_p, shards)
    return jnp.where(kept | ~draws, scaled, -jnp.inf)
