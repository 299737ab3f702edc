"""GGUF's blocks of 256 numbers, whose groups of 16 or 32 have scales of 6 or 8 bits, as they lie in memory."""

from dataclasses import dataclass

import numpy as np

from jaxpaged.loading import panels


@dataclass(frozen=True, slots=True)
class _Fields:
    """Where in a block its fields begin, and how many bits of each number are not in `low`."""

    scales: int
    supers: tuple[int, ...]  # of the scales and the minimums
    low: int
    high: int
    high_bits: int


KINDS = {"Q4_K": _Fields(4, (0, 2), 16, 0, 0), "Q5_K": _Fields(4, (0, 2), 48, 16, 1),
         "Q6_K": _Fields(192, (208,), 0, 128, 2)}


def packed(blocks: np.ndarray, kind: str, leaf: str) -> np.ndarray:
    """An array of `PackedType.shapes` of blocks [n, B, bytes], n a multiple of 16."""
    fields = KINDS[kind]
    if leaf == "s":
        numbers = [blocks[..., first : first + 2].copy().view(np.float16)[..., 0] for first in fields.supers]
        return np.concatenate([panels.columns(number) for number in numbers], axis=2)
    if leaf in "dm":
        scales = _scales(blocks, fields)[leaf == "m"]
        return panels.columns(scales.reshape(len(blocks), -1))
    if leaf == "q":
        return panels.words(_low(blocks, fields), 4)
    high = _high(blocks, fields)
    return panels.words(np.bitwise_or.reduce(
        high.reshape(*high.shape[:1], -1, 8 // fields.high_bits)
        << (fields.high_bits * np.arange(8 // fields.high_bits, dtype=np.uint8)), axis=2), 8)


def _scales(blocks: np.ndarray, fields: _Fields) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [n, B, 8 or 16] of the scales and, for groups of 32, of the minimums."""
    if fields.high_bits == 2:
        found = blocks[..., fields.scales : fields.scales + 16]
        return found, found
    stored = blocks[..., fields.scales : fields.scales + 12]
    first, second, mixed = stored[..., :4], stored[..., 4:8], stored[..., 8:]
    return (np.concatenate([first & 63, mixed & 15 | first >> 6 << 4], -1),
            np.concatenate([second & 63, mixed >> 4 | second >> 6 << 4], -1))


def _low(blocks: np.ndarray, fields: _Fields) -> np.ndarray:
    """The low four bits [n, 256 B]."""
    octets = blocks[..., fields.low : fields.low + 128]
    run = 64 if fields.high_bits == 2 else 32  # of bytes, whose low halves come before the high ones
    runs = octets.reshape(*octets.shape[:2], -1, run)
    return np.stack([runs & 15, runs >> 4], axis=3).reshape(len(blocks), -1)


def _high(blocks: np.ndarray, fields: _Fields) -> np.ndarray:
    """The other bits [n, 256 B]."""
    bits, count = fields.high_bits, 8 // fields.high_bits
    octets = blocks[..., fields.high : fields.high + 32 * bits].reshape(*blocks.shape[:2], bits, 1, 32)
    shifts = (bits * np.arange(count, dtype=np.uint8))[:, None]
    return (octets >> shifts & ((1 << bits) - 1)).reshape(len(blocks), -1)
