"""The dtype of a stored tensor, by the name that a file's format has for it."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxpaged.core.errors import CheckpointError


def stored_dtype(path: Path, tensor: str, stored: str, supported: Mapping[str, np.dtype]) -> np.dtype:
    """The dtype of a tensor of the file at `path`, which is stored as `stored`.

    Raises:
        CheckpointError: it is not one of those supported.
    """
    if stored not in supported:
        raise CheckpointError(f"{path}: tensor {tensor} is stored as {stored}, which is not supported; "
                              f"supported are {', '.join(supported)}")
    return supported[stored]
