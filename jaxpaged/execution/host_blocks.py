"""The bytes of blocks in host memory: pinned on a GPU's host, plain on CPU. Nothing here waits for the device."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxpaged.execution.programs import ProgramSet
from jaxpaged.models.transformer import Pools
from jaxpaged.scheduling.host_tier import LoadBlocks, SaveBlocks


class HostBlocks:
    """Segments of blocks by number, as `HostTier` gives them out.

    Args:
        memory_kind: JAX's name of the memory that they are kept in; None for that of the device.
    """

    def __init__(self, programs: ProgramSet, memory_kind: str | None) -> None:
        self._programs = programs
        self._memory_kind = memory_kind
        self._segments: dict[int, Pools] = {}

    def save(self, pools: Pools, saves: Sequence[SaveBlocks]) -> None:
        """Begin to copy blocks out of the pools, as they are once all that is dispatched so far has run."""
        for item in saves:
            content: Pools = self._programs.get(("gather", len(item.blocks)))(pools, np.array(item.blocks, np.int32))
            self._segments[item.segment] = content if self._memory_kind is None else _moved(content, self._memory_kind)

    def load(self, pools: Pools, loads: Sequence[LoadBlocks]) -> Pools:
        """Copy blocks back; the null block takes what is not wanted."""
        for item in loads:
            kept = self._segments[item.segment]
            content = kept if self._memory_kind is None else _moved(kept, "device")
            pools = self._programs.get(("scatter", len(item.blocks)))(pools, content, np.array(item.blocks, np.int32))
        return pools

    def drop(self, segments: Sequence[int]) -> None:
        """Give back the memory of segments."""
        for segment in segments:
            self._segments.pop(segment, None)


def _moved(content: Pools, memory_kind: str) -> Pools:
    """Begin to move what `gather` gave."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(memory_kind), content)
    moved: Pools = jax.device_put(content, shardings)
    return moved
