"""Which experts a token is sent to, and with what weight: one rule for all families.

| family | scores | bias | groups | normalized | scale |
|---|---|---|---|---|---|
| Mixtral, Qwen3-MoE | softmax | - | - | yes | 1 |
| Qwen2-MoE, OLMoE, DeepSeek-V2-Lite | softmax | - | - | no | 1 |
| DeepSeek-V2 | softmax | - | 8, best 3, by their best expert | no | 16 |
| DeepSeek-V3 | sigmoid | yes | 8, best 4, by their two best | yes | 2.5 |
| Kimi K2, GLM-4.5 | sigmoid | yes | - | yes | their own |
| gpt-oss, Granite MoE | softmax | - | - | yes | 1 |

Normalized softmax scores of the chosen experts are the softmax of the chosen logits, so gpt-oss needs no rule of its
own. Of equal scores the expert with the lower number comes first.
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
    """

    top_k: int
    sigmoid: bool = False
    groups: int = 1
    best_groups: int = 1
    by_two: bool = False
    normalized: bool = True
    scale: float = 1.0


def choose_experts(
    logits: jax.Array,  # [T, E] float32
    bias: jax.Array | None,  # [E] float32, of the choice alone, not of the weights
    rule: RoutingRule,
) -> tuple[jax.Array, jax.Array]:
    """Experts [T, k] int32, the best first, and their weights [T, k] float32."""
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
