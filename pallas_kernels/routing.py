"""Which experts a token is sent to, and with what weight: one rule for all families.

| family | scores | bias | groups | normalized | scale |
|---|---|---|---|---|---|
| Mixtral, Qwen3-MoE | softmax | - | - | yes | 1 |
| Qwen2-MoE, OLMoE, DeepSeek-V2-Lite | softmax | - | - | no | 1 |
| DeepSeek-V2 | softmax | - | 8, best 3, by their best expert | no | 16 |
| DeepSeek-V3 | sigmoid | yes | 8, best 4, by their two best | yes | 2.5 |
| Kimi K2, GLM-4.5 | sigmoid | yes | - | yes | their own |
| MiniMax-M2 | sigmoid | yes | - | yes | 1 |
| ERNIE 4.5 | softmax | yes | - | yes | 1 |
| gpt-oss, Granite MoE | softmax | - | - | yes | 1 |

Normalized softmax scores of the chosen experts are the softmax of the chosen logits, so gpt-oss needs no rule of its
own. PhiMoE chooses by logits, and weighs each expert among those of about its own logit alone: see `margin`. Of equal
scores the expert with the lower number comes first.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

_INELIGIBLE = -1e30
_TINY = 1e-20  # sigmoids may all be zero


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How experts are chosen.

    Attributes:
        top_k: how many experts a token is sent to.
        sigmoid: scores are sigmoids of the logits; else their softmax.
        groups, best_groups: only experts of the best groups are eligible; 1 and 1: all are. Neighbors form a group.
        by_two: a group is as good as the sum of its two best experts; else as its best one.
        normalized: the weights of a token are divided by their sum.
        scale: factor on all weights.
        margin: experts are chosen one after the other, each weighed by its share in the softmax over itself and what is
            not chosen yet, of which only logits count that lie less than this share below it (SparseMixer; Liu et al.,
            2023). No other field but `top_k` says anything then.
    """

    top_k: int
    sigmoid: bool = False
    groups: int = 1
    best_groups: int = 1
    by_two: bool = False
    normalized: bool = True
    scale: float = 1.0
    margin: float | None = None


def choose_experts(
    logits: jax.Array,  # [T, E] float32
    bias: jax.Array | None,  # [E] float32, of the choice alone, not of the weights
    rule: RoutingRule,
) -> tuple[jax.Array, jax.Array]:
    """Experts [T, k] int32, the best first, and their weights [T, k] float32."""
    if rule.margin is not None:
        return _one_by_one(logits, rule.top_k, rule.margin)
    scores = jax.nn.sigmoid(logits) if rule.sigmoid else jax.nn.softmax(logits, axis=1)
    merit = scores if bias is None else scores + bias
    if rule.groups > 1:
        grouped = merit.reshape(len(merit), rule.groups, -1)
        of_group = jax.lax.top_k(grouped, 2)[0].sum(axis=2) if rule.by_two else grouped.max(axis=2)
        best = jax.lax.top_k(of_group, rule.best_groups)[1]
        eligible = jax.nn.one_hot(best, rule.groups).sum(axis=1) > 0
        merit = jnp.where(jnp.repeat(eligible, grouped.shape[2], axis=1), merit, _INELIGIBLE)
    expert = jax.lax.top_k(merit, rule.top_k)[1]
    weight = jnp.take_along_axis(scores, expert, axis=1)
    if rule.normalized:
        weight = weight / (weight.sum(axis=1, keepdims=True) + _TINY)
    return expert, weight * rule.scale


def _one_by_one(logits: jax.Array, top_k: int, margin: float) -> tuple[jax.Array, jax.Array]:
    """See `RoutingRule.margin`."""
    experts, weights, left = [], [], logits
    for _ in range(top_k):
        best = jnp.max(left, axis=1, keepdims=True)
        expert = jnp.argmax(left, axis=1)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > margin
        # The chosen one is the largest of those that count: its power is 1.
        weights.append(1 / jnp.sum(jnp.where(far, 0, jnp.exp(left - best)), axis=1))
        experts.append(expert)
        left = jnp.where(jnp.arange(logits.shape[1]) == expert[:, None], -jnp.inf, left)
    return jnp.stack(experts, axis=1).astype(jnp.int32), jnp.stack(weights, axis=1)
