"""Reference implementation of every kernel: short, slow, obviously right. Tests compare the fast paths with it.

Axis letters: T tokens, N query heads, K kv heads, H head dim, P pages, S page size, E experts, k experts of a token,
D model, F mlp.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels.attention_rule import AttentionRule, HeadBias
from jaxpaged.pallas_kernels.kv_pages import KVPages, quantize
from jaxpaged.pallas_kernels.packed_layout import PackedLayout, PackedWeight, dequantize
from jaxpaged.pallas_kernels.routing import RoutingRule


def write_kv(
    pages: KVPages,
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    page: jax.Array,  # [T] int32
    offset: jax.Array,  # [T] int32, 0 to S - 1
) -> KVPages:
    """Write the keys and values of T tokens into the pools, one token after another."""
    k_pool, v_pool, k_scale, v_scale = pages
    for t in range(k.shape[0]):
        new_k, new_v = k[t], v[t]  # [K, H]
        if k_scale is not None and v_scale is not None:
            new_k, key_scale = quantize(new_k, k_pool.dtype)
            new_v, value_scale = quantize(new_v, v_pool.dtype)
            k_scale = k_scale.at[page[t], :, offset[t]].set(key_scale)
            v_scale = v_scale.at[page[t], :, offset[t]].set(value_scale)
        k_pool = k_pool.at[page[t], offset[t]].set(new_k.astype(k_pool.dtype))
        v_pool = v_pool.at[page[t], offset[t]].set(new_v.astype(v_pool.dtype))
    return KVPages(k_pool, v_pool, k_scale, v_scale)


def paged_attention(
    q: jax.Array,  # [T, N, H]
    pages: KVPages,
    block_table: jax.Array,  # [rows, width] int32, the pages of each slot in order
    slot: jax.Array,  # [T] int32
    position: jax.Array,  # [T] int32
    rule: AttentionRule,
    bias: HeadBias,
) -> jax.Array:  # [T, N, H]
    """Attention of each token to positions 0 to its own by the rule, all read through its slot's block table."""
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = pages.k.shape[1], pages.k.shape[2]
    context = block_table.shape[1] * page_size

    def gather(pool: jax.Array, scales: jax.Array | None) -> jax.Array:  # [T, context, N, H]
        if scales is not None:
            pool = pool.astype(jnp.float32) * scales.swapaxes(1, 2)[..., None]
        rows = pool[block_table[slot]].reshape(tokens, context, kv_heads, head_dim)
        return jnp.repeat(rows, heads // kv_heads, axis=2).astype(q.dtype)

    distance = jnp.arange(context)[None, :] - position[:, None]  # [T, context], 0 for a token itself
    seen = distance <= 0
    if rule.window is not None:
        seen &= distance > -rule.window
    scores = jnp.einsum("tnh,tcnh->tnc", q, gather(pages.k, pages.k_scale)).astype(jnp.float32) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * jnp.tanh(scores / rule.softcap)
    if bias.slopes is not None:
        scores = scores + bias.slopes[:, None] * distance[:, None, :]
    scores = jnp.where(seen[:, None, :], scores, -jnp.inf)
    if bias.sinks is not None:  # one more column, whose weight goes nowhere
        scores = jnp.concatenate([scores, jnp.broadcast_to(bias.sinks[None, :, None], (tokens, heads, 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[:, :, :context]
    values = jnp.where(seen[:, :, None, None], gather(pages.v, pages.v_scale), 0)
    return jnp.einsum("tnc,tcnh->tnh", weights.astype(q.dtype), values)


def rotary_kv_write(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    cos: jax.Array,  # [T, H // 2] float32
    sin: jax.Array,  # [T, H // 2] float32
    page: jax.Array,  # [T] int32, -1 in rows that write nothing
    offset: jax.Array,  # [T] int32
    pages: KVPages,
) -> tuple[jax.Array, KVPages]:
    """Turn queries and keys by their angles, first half of H against second, and write the rows that have a page.

    Where a token's key or value is not finite, the value becomes zeros and the key NaN.
    """
    def turned(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1).astype(x.dtype)

    k = turned(k)
    stored = pages.k.dtype if pages.k_scale is None else k.dtype
    finite = jnp.isfinite(k.astype(stored)) & jnp.isfinite(v.astype(stored))
    sound = jnp.all(finite, axis=-1, keepdims=True)  # [T, K, 1]
    k, v = jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0)
    real = jnp.nonzero(page >= 0)[0]
    return turned(q), write_kv(pages, k[real], v[real], page[real], offset[real])


def packed_linear(x: jax.Array, weight: PackedWeight, layout: PackedLayout) -> jax.Array:
    """x [M, K] times the weight in float32, rounded once to the dtype of x: [M, N]."""
    return (x.astype(jnp.float32) @ dequantize(weight, layout)).astype(x.dtype)


def sample(
    logits: jax.Array,  # [V] float32
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    key: jax.Array,
) -> jax.Array:  # [] int32
    """One row's next token: temperature, then min-p, top-k and top-p over what is left, then a draw; 0 is greedy."""
    if temperature == 0:
        return jnp.argmax(logits)
    scaled = logits / temperature
    relative = scaled - scaled.max()
    descending = jnp.sort(relative)[::-1]
    kept = relative >= jnp.log(min_p)
    if 0 < top_k < logits.size:
        kept &= relative >= descending[top_k - 1]
    if top_p < 1:
        mass = jnp.where(kept, jnp.exp(relative), 0)
        above = jnp.sum(jnp.where(relative[None, :] > relative[:, None], mass[None, :], 0), axis=1)
        kept &= above < top_p * mass.sum()
    return jnp.argmax(jnp.where(kept, scaled + jax.random.gumbel(key, logits.shape), -jnp.inf))


def top_tokens(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row of [B, V] in order, of equals the first first: values, and their columns."""
    order = jnp.argsort(-logits, axis=1, stable=True)[:, :count]
    return jnp.take_along_axis(logits, order, axis=1), order.astype(jnp.int32)


def choose_experts(logits: np.ndarray, bias: np.ndarray | None, rule: RoutingRule) -> tuple[np.ndarray, np.ndarray]:
    """Experts [T, k] int32 and weights [T, k] of logits [T, E] by the rule, token by token, in float64."""
    experts, weights = [], []
    for row in np.asarray(logits, np.float64):
        if rule.margin is not None:
            left = {expert: float(logit) for expert, logit in enumerate(row)}
            order, shares = [], []
            for _ in range(rule.top_k):
                best = max(left.values())
                near = [logit for logit in left.values() if best - logit <= rule.margin * max(abs(logit), best)]
                order.append(min(expert for expert in left if left[expert] == best))
                shares.append(1 / sum(np.exp(logit - best) for logit in near))
                del left[order[-1]]
            experts.append(np.array(order))
            weights.append(np.array(shares))
            continue
        power = np.exp(row - row.max())
        scores = 1 / (1 + np.exp(-row)) if rule.sigmoid else power / power.sum()
        merit = scores.copy() if bias is None else scores + bias
        if rule.groups > 1:
            grouped = merit.reshape(rule.groups, -1)
            of_group = np.sort(grouped, axis=1)[:, -2:].sum(axis=1) if rule.by_two else grouped.max(axis=1)
            grouped[np.argsort(-of_group, kind="stable")[rule.best_groups :]] = -np.inf
        chosen = np.argsort(-merit, kind="stable")[: rule.top_k]
        total = scores[chosen].sum() if rule.normalized else 1
        experts.append(chosen)
        weights.append(scores[chosen] / total * rule.scale)
    return np.array(experts, np.int32).reshape(-1, rule.top_k), np.array(weights).reshape(-1, rule.top_k)


def experts(
    x: np.ndarray,  # [T, D]
    expert: np.ndarray,  # [T, k]; E: sent nowhere
    weight: np.ndarray,  # [T, k]
    gate_up: np.ndarray,  # [E, D, 2 * F], gate before up
    down: np.ndarray,  # [E, F, D]
) -> np.ndarray:  # [T, D] float64
    """The weighted sum of what each token's experts, with silu, make of it, pair by pair, in float64."""
    x, gate_up, down = (np.asarray(array, np.float64) for array in (x, gate_up, down))
    result = np.zeros(x.shape)
    for token, column in np.argwhere(expert < len(down)):
        number = expert[token, column]
        gate, up = np.split(x[token] @ gate_up[number], 2)
        hidden = gate / (1 + np.exp(-gate)) * up
        result[token] += float(weight[token, column]) * (hidden @ down[number])
    return result
