"""The bytes of blocks in host memory: pinned on a GPU's host, plain on CPU. Nothing here waits for the device."""

from collections.abc import Sequence

import numpy as np

from jaxpaged.execution.programs import ProgramSet
from jaxpaged.models.transformer import Pools
from jaxpaged.scheduling.host_tier import LoadBlocks, SaveBlocks


class HostBlocks:
    """Chunks of blocks by number, as `HostTier` gives them out."""

    def __init__(self, programs: ProgramSet) -> None:
        self._programs = programs
        self._chunks: dict[int, Pools] = {}

    def save(self, pools: Pools, saves: Sequence[SaveBlocks]) -> None:
        """Begin to copy blocks out of the pools, as they are once all that is dispatched so far has run."""
        for item in saves:
            content: Pools = self._programs.get(("gather", len(item.blocks)))(pools, np.array(item.blocks, np.int32))
            self._chunks[item.chunk] = self._programs.to_host(content)

    def load(self, pools: Pools, loads: Sequence[LoadBlocks]) -> Pools:
        """Copy blocks back; the null block takes what is not wanted."""
        for item in loads:
            content = self._programs.to_device(self._chunks[item.chunk])
            pools = self._programs.get(("scatter", len(item.blocks)))(pools, content, np.array(item.blocks, np.int32))
        return pools

    def drop(self, chunks: Sequence[int]) -> None:
        """Give back the memory of chunks."""
        for chunk in chunks:
            self._chunks.pop(chunk, None)
