"""GGUF's blocks as they lie in memory: the file's numbers, in an order that a product can read one after the other."""

from collections.abc import Mapping

import numpy as np

_BATCH = 1 << 20  # bytes of blocks that are reordered at a time


def pack(blocks: np.ndarray, kind: str, rows: np.ndarray, to: Mapping[str, np.ndarray]) -> None:
    """Reorder blocks.

    Args:
        blocks: uint8 [N, blocks of a row, bytes of a block], as in the file.
        kind: the blocks' type, as GGUF spells it.
        rows: which rows of them; a multiple of 16.
        to: arrays of `models.quantization.packed_shapes` for these rows, by name, which are filled.
    """
    step = max(16, _BATCH // blocks[0].nbytes // 16 * 16)
    for first in range(0, len(rows), step):
        batch = np.ascontiguousarray(blocks[rows[first : first + step]])
        panels = slice(first // 16, (first + len(batch)) // 16)
        for name, out in to.items():
            out[panels] = _words(batch, kind) if name == "q" else _scales(batch, 2 * (name == "m"))


def _words(blocks: np.ndarray, kind: str) -> np.ndarray:
    """The words [n / 16, words of a row, 64] of rows whose blocks are [n, B, bytes]."""
    codes = blocks[..., 4 if kind == "Q4_1" else 2 :]
    if kind == "Q8_0":
        words = (codes ^ 0x80).reshape(*codes.shape[:2], 8, 4)  # the signed numbers plus 128
    else:
        # Of a block's 32 numbers, the first 16 are the low halves of its bytes. A word has eight that follow one
        # another: its bytes' low halves the first four, their high halves the others.
        halves = np.stack([codes & 15, codes >> 4], axis=2).reshape(*codes.shape[:2], 4, 2, 4)
        words = halves[..., 0, :] | halves[..., 1, :] << 4
    panels = words.reshape(len(blocks) // 16, 16, -1, 4).transpose(0, 2, 1, 3)
    return panels.reshape(*panels.shape[:2], 64)


def _scales(blocks: np.ndarray, first: int) -> np.ndarray:
    """The float16 numbers that begin at a byte of each block: [n / 16, B, 16]."""
    numbers = blocks[..., first : first + 2].copy().view(np.float16)
    return numbers.reshape(len(blocks) // 16, 16, -1).transpose(0, 2, 1)
