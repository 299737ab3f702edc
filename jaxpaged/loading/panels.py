"""Numbers of weights as they lie in memory: words of panels of 16 outputs, in the order of a product's reads."""

import numpy as np


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned numbers uint8 [out, in] as words, uint8 [out / 16, words of an output, 64].

    A word of 4-bit numbers has eight neighbors: its bytes' low halves are the first four, the high halves the others.
    """
    if bits == 8:
        octets = codes.reshape(*codes.shape[:1], -1, 4)
    else:
        halves = codes.reshape(*codes.shape[:1], -1, 2, 4)
        octets = halves[..., 0, :] | halves[..., 1, :] << 4
    panels = octets.reshape(len(codes) // 16, 16, -1, 4).transpose(0, 2, 1, 3)
    return panels.reshape(*panels.shape[:2], 64)


def columns(numbers: np.ndarray) -> np.ndarray:
    """One number of each output and group, [out, G], as [out / 16, G, 16]."""
    return numbers.reshape(len(numbers) // 16, 16, -1).transpose(0, 2, 1)
