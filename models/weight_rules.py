"""One row per parameter: the checkpoint's tensor name, our parameter path, and how one becomes the other.

A row serves all layers: `{i}` in both names is the layer number. Transforms are named so that a table reads
like a list of facts; each takes and returns a numpy array.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Transform = Callable[[np.ndarray], np.ndarray]
Axes = tuple[str | None, ...]  # names of a parameter's axes that devices may share out; None, or left out: whole


@dataclass(frozen=True, slots=True)
class WeightRule:
    """`tensor` in the checkpoint (Hugging Face spelling) becomes the parameter at `path` after `transform`.

    `axes` are the parameter's, after the transform: "heads", "kv_heads", "mlp" or "vocab".
    """

    tensor: str
    path: str
    transform: Transform
    axes: Axes = ()


def as_is(tensor: np.ndarray) -> np.ndarray:
    """Norm scales, biases, and the embedding [V, D]."""
    return tensor


def transposed(tensor: np.ndarray) -> np.ndarray:
    """A linear layer: stored [out, in], used [in, out]."""
    return tensor.T
