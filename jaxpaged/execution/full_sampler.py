"""The full variant of the sampler: what only some requests want, so that batches without them pay for none of it."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.execution.logprobs import packed_logprobs, packed_width
from jaxpaged.execution.sampler import SamplingState, keep_mask, sample


def sample_full(
    logits: jax.Array, state: SamplingState, position: jax.Array, *, num_top: int, processed_logprobs: bool
) -> tuple[jax.Array, jax.Array]:
    """Pick one token per row and tell its log probability.

    Args:
        logits: [B, V] float32.
        state: the rows' parameters.
        position: [B] int32, the sequence position that the new token will have.
        num_top: alternatives to report, see `packed_logprobs`.
        processed_logprobs: log probabilities of what is drawn from, not of the model's own logits.

    Returns:
        Ids [B] as `sample` gives them, and `packed_logprobs` [B, 2 + 2 * num_top], zeros if no row wants them.
    """
    ids = sample(logits, state, position)

    def tell() -> jax.Array:
        return packed_logprobs(_drawn_from(logits, state) if processed_logprobs else logits, ids, num_top)

    nothing = jnp.zeros((logits.shape[0], packed_width(num_top)), jnp.int32)
    return ids, lax.cond(jnp.any(state.logprobs), tell, lambda: nothing)


def _drawn_from(logits: jax.Array, state: SamplingState) -> jax.Array:
    """The logits after temperature and cuts; those of greedy rows as they are."""
    draws = (state.temperature > 0)[:, None]
    scaled = logits / jnp.where(draws, state.temperature[:, None], 1)
    kept = keep_mask(scaled, state.top_k, state.top_p, state.min_p)
    return jnp.where(kept | ~draws, scaled, -jnp.inf)
