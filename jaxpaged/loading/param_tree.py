"""A model's parameters as nested dicts: walked, filled, and compared with what a checkpoint holds."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.core.errors import CheckpointError

KeyPath = tuple[str | int, ...]

_MAX_PROBLEMS = 20


def leaves(tree: Mapping[Any, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every leaf with the keys that lead to it."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def insert(tree: dict[Any, Any], path: KeyPath, leaf: Any) -> None:
    """Put a leaf where these keys lead, making dicts on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def mismatch(path: Path, problems: Sequence[str]) -> CheckpointError:
    """The error of a checkpoint that is not the model's, with everything that differs, up to a bound."""
    more = len(problems) - _MAX_PROBLEMS
    listed = [*problems[:_MAX_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
    return CheckpointError("\n  ".join([f"{path} does not match the model its config describes:", *listed]))
