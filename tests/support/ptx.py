"""The few PTX instructions of our inline assembly, run on arrays of 32-bit registers."""

import re
from typing import Any

import ml_dtypes
import numpy as np

HALVES: dict[str, Any] = {"f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16}


def run(code: str, **arguments: np.ndarray) -> np.ndarray:
    """Register $0 after `code`, a block in braces; arguments a1, a2, ... are registers $1, $2, ... [n] uint32.

    Raises:
        ValueError: an instruction is not among the few.
    """
    registers = {f"${name[1:]}": value for name, value in arguments.items()}
    size = len(next(iter(registers.values())))

    def value(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(size, number, np.uint32)

    for line in code.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        operation, operands = line.split(maxsplit=1)
        to, *names = re.split(r",\s*", operands.strip())
        registers[to] = _execute(operation, [value(name) for name in names])
    return registers["$0"]


def _execute(operation: str, args: list[np.ndarray]) -> np.ndarray:
    match operation:
        case "mov.b32":
            return args[0].copy()
        case "shr.b32":
            return args[0] >> args[1]
        case "shl.b32":
            return args[0] << args[1]
        case "and.b32":
            return args[0] & args[1]
        case "lop3.b32" if (args[3] == 0xEA).all():
            return (args[0] & args[1]) | args[2]
        case "prmt.b32":
            return _permuted(args[0], args[1], int(args[2][0]))
        case "add.rn.f32":
            return (args[0].view(np.float32) + args[1].view(np.float32)).view(np.uint32)
        case "cvt.rn.bf16x2.f32":  # the first source becomes the upper half
            high, low = (arg.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16) for arg in args)
            return low.astype(np.uint32) | high.astype(np.uint32) << 16
    name, _, width = operation.partition(".rn.")
    if name not in ("add", "mul", "fma") or width not in HALVES:
        raise ValueError(f"no emulation of {operation}")
    # Exact in float64, so the result is rounded once.
    wide = [arg.view(HALVES[width]).astype(np.float64) for arg in args]
    exact = wide[0] + wide[1] if name == "add" else wide[0] * wide[1] + (wide[2] if name == "fma" else 0)
    return np.asarray(exact).astype(HALVES[width]).view(np.uint32)


def _permuted(low: np.ndarray, high: np.ndarray, selector: int) -> np.ndarray:
    """Four bytes of the eight of two registers, by the four nibbles of the selector."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(low)
    for byte in range(4):
        chosen = both >> np.uint64(8 * (selector >> 4 * byte & 7)) & np.uint64(255)
        result |= chosen.astype(np.uint32) << np.uint32(8 * byte)
    return result
