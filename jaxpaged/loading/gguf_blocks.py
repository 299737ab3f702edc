"""GGUF's blocks as they lie in memory: the file's numbers, in an order that a product can read one after the other."""

from collections.abc import Mapping

import numpy as np

from jaxpaged.loading import gguf_super_blocks, panels

_BATCH = 1 << 20  # bytes of blocks that are reordered at a time


def pack(blocks: np.ndarray, kind: str, rows: np.ndarray, to: Mapping[str, np.ndarray]) -> None:
    """Reorder blocks.

    Args:
        blocks: uint8 [N, blocks of a row, bytes of a block], as in the file.
        kind: the blocks' type, as GGUF spells it.
        rows: which rows of them; a multiple of 16.
        to: arrays of `PackedType.shapes` for these rows, by name, which are filled.
    """
    step = max(16, _BATCH // blocks[0].nbytes // 16 * 16)
    for first in range(0, len(rows), step):
        batch = np.ascontiguousarray(blocks[rows[first : first + step]])
        part = slice(first // 16, (first + len(batch)) // 16)
        for name, out in to.items():
            if kind in gguf_super_blocks.KINDS:
                out[part] = gguf_super_blocks.packed(batch, kind, name)
            elif name == "q":
                out[part] = panels.words(_codes(batch, kind), 8 if kind == "Q8_0" else 4)
            else:
                out[part] = panels.columns(_scales(batch, 2 * (name == "m")))


def _codes(blocks: np.ndarray, kind: str) -> np.ndarray:
    """The numbers of blocks [n, B, bytes], unsigned: [n, 32 B]."""
    codes = blocks[..., 4 if kind == "Q4_1" else 2 :]
    if kind == "Q8_0":
        return (codes ^ 0x80).reshape(len(blocks), -1)  # the signed numbers plus 128
    # Of a block's 32 numbers, the first 16 are the low halves of its bytes.
    return np.concatenate([codes & 15, codes >> 4], axis=2).reshape(len(blocks), -1)


def _scales(blocks: np.ndarray, first: int) -> np.ndarray:
    """The float16 numbers that begin at a byte of each block: [n, B]."""
    return blocks[..., first : first + 2].copy().view(np.float16)[..., 0]
