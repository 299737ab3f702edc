"""The bytes of blocks in host memory: pinned on a GPU's host, plain on CPU. Nothing here waits for the device."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxpaged.execution.programs import ProgramSet
from jaxpaged.models.transformer import Pools
from jaxpaged.scheduling.scheduler_output import LoadBlocks, SaveBlocks


class HostBlocks:
    """Segments of blocks by number, as `HostTier` numbers them.

    Args:
        memory_kind: JAX's name of the memory that they are saved in; None for that of the device.
    """

    def __init__(self, programs: ProgramSet, memory_kind: str | None) -> None:
        self._programs = programs
        self._memory_kind = memory_kind
        self._segments: dict[int, Pools] = {}

    def save(self, pools: Pools, saves: Sequence[SaveBlocks]) -> None:
        """Start to copy blocks out of the pools, as they are once all that is dispatched so far has run."""
        for item in saves:
            content: Pools = self._programs.get(("gather", len(item.blocks)))(pools, np.array(item.blocks, np.int32))
            self._segments[item.segment] = content if self._memory_kind is None else _moved(content, self._memory_kind)

    def load(self, pools: Pools, loads: Sequence[LoadBlocks]) -> Pools:
        """Copy blocks back; unwanted ones go to the null block."""
        for item in loads:
            saved = self._segments[item.segment]
            content = saved if self._memory_kind is None else _moved(saved, "device")
            pools = self._programs.get(("scatter", len(item.blocks)))(pools, content, np.array(item.blocks, np.int32))
        return pools

    def drop(self, segments: Sequence[int]) -> None:
        """Free the memory of segments."""
        for segment in segments:
            self._segments.pop(segment, None)


def _moved(content: Pools, memory_kind: str) -> Pools:
    """Start to move what `gather` returned."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(memory_kind), content)
    moved: Pools = jax.device_put(content, shardings)
    return moved
