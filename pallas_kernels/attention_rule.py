"""Which tokens a layer's queries see, and how their scores are made; all attention paths follow it.

A query at position i sees keys at positions j <= i. Its score is, in this order:

    s = scale * (q . k);  s = softcap * tanh(s / softcap);  s = s - slope[head] * (i - j)

and the weights are exp(s) over their sum, to which a sink adds exp(sink[head]) without a value of its own.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What is fixed when a program is traced.

    Attributes:
        scale: of the products.
        window: a query sees itself and the `window - 1` tokens before it; None: all before it.
        softcap: bound on the scores' magnitude (Gemma 2).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class HeadBias(NamedTuple):
    """What differs by query head; None where a model has none."""

    slopes: jax.Array | None = None  # [N] float32, ALiBi (Press et al., 2022)
    sinks: jax.Array | None = None  # [N] float32, attention sinks (gpt-oss)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """[N] float32: a geometric sequence from 2^(-8 / n), n the largest power of two up to N; the rest lies between."""
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * (num_heads - power), 2))
    return np.concatenate([slopes, between]).astype(np.float32)
