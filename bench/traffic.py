"""Synthetic traffic for the simulator: when requests arrive and how long they are."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal prompt and answer lengths, cut so that both together fit the context.

    Attributes:
        prompt_mean, output_mean: means of the uncut distributions, in tokens.
        prompt_sigma, output_sigma: standard deviations of the logarithms.
    """

    name: str
    prompt_mean: float
    prompt_sigma: float
    output_mean: float
    output_sigma: float

    def draw(self, source: random.Random, context: int) -> tuple[int, int]:
        """A prompt length and an answer length."""
        prompt = _log_normal(source, self.prompt_mean, self.prompt_sigma, context // 2)
        return prompt, _log_normal(source, self.output_mean, self.output_sigma, context - prompt)


# Means as Kwon et al. (SOSP 2023) give them for the two sets; the spreads are chosen here, for tails of the same kind.
DATASETS = {item.name: item for item in (
    Lengths("sharegpt", 161.3, 1.2, 338.0, 0.9),
    Lengths("alpaca", 19.3, 0.6, 58.5, 0.9),
)}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the traffic.

    Attributes:
        time: seconds from the start.
        output_tokens: where its answer ends by itself.
        hint: what its sender expects the answer's length to be, or None.
        priority: smaller is more important.
    """

    time: float
    prompt_tokens: int
    output_tokens: int
    hint: int | None
    priority: int


def poisson_traffic(
    lengths: Lengths, rate: float, count: int, *, seed: int, context: int, hint_error: float | None = None,
    important_share: float = 0.1,
) -> list[Arrival]:
    """`count` requests that arrive at random, `rate` per second in the mean.

    The same seed gives the same requests at every rate, only closer together.

    Args:
        hint_error: standard deviation of the logarithm of a hint's error: 0 for exact hints, 0.7 for hints off by about
            a factor of two; None for no hints.
        important_share: share of the requests with priority 0; the others have 1.
    """
    source = random.Random(f"{lengths.name} {seed}")
    arrivals, now = [], 0.0
    for _ in range(count):
        now += source.expovariate(1.0) / rate
        prompt, output = lengths.draw(source, context)
        error, important = source.gauss(0, 1), source.random() < important_share
        hint = None if hint_error is None else max(1, round(output * math.exp(error * hint_error)))
        arrivals.append(Arrival(now, prompt, output, hint, 0 if important else 1))
    return arrivals


def _log_normal(source: random.Random, mean: float, sigma: float, maximum: int) -> int:
    value = mean * source.lognormvariate(-(sigma**2) / 2, sigma)
    return max(1, min(round(value), maximum))
