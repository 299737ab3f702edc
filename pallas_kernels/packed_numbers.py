"""Packed numbers as 16-bit floats, inside a kernel: bit tricks in PTX, and the same in JAX for the interpreter.

Conversions of integers and of fp8 are slow or missing on some GPUs, so the bits of a float are put together:

    int4        q under the exponent of 128 (bfloat16) or 1024 (float16): the number `offset` + q, exactly
    int8        a byte under the exponent of 2^23, as float32, less 2^23 + 128 (bfloat16), or of 1024 (float16)
    fp8         sign and the other bits under a 16-bit float's exponent, times the quotient of the exponents' biases:
                2^120 (bfloat16) or 2^8 (float16); exact, subnormal numbers included, and without fp8 hardware

Each instruction works on the two words of a register. fp8's NaN becomes 480.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.pallas_kernels.lowering import inline_asm
from jaxpaged.pallas_kernels.packed_layout import BITS


def offset(kind: str, dtype: jnp.dtype) -> int:
    """How much more than the number `unpack` gives, which spares an instruction; see `PackedLayout.numbers`."""
    return 0 if kind != "int4" else 1024 if dtype == jnp.float16 else 128


def unpack(words: jax.Array, field: int, kind: str, dtype: jnp.dtype, *, interpret: bool) -> jax.Array:
    """A field of int16 words as floats of `dtype` (bfloat16 or float16), plus `offset`."""
    if not interpret:
        result = jax.ShapeDtypeStruct(words.shape, dtype)
        return inline_asm(ptx(field, kind, dtype == jnp.float16), words, constraints="=r,r", pack=2, result=result)
    bits = BITS[kind]
    stored = (words >> (bits * field)) & ((1 << bits) - 1)
    if kind == "fp8":
        return lax.bitcast_convert_type(stored.astype(jnp.uint8), jnp.float8_e4m3fn).astype(dtype)
    return (stored + (offset(kind, dtype) if kind == "int4" else -128)).astype(dtype)


def ptx(field: int, kind: str, half: bool) -> str:
    """Instructions from two words in register $1 to the floats of a field of theirs in $0: float16, or bfloat16."""
    code = {"int4": _int4, "int8": _int8, "fp8": _fp8}[kind](field, half)
    return "{ .reg .b32 t, u, f; " + " ".join(code) + " }"


def _int4(field: int, half: bool) -> list[str]:
    if not half:
        return [f"shr.b32 t, $1, {4 * field};", "lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea;"]
    move = f"shr.b32 t, $1, {8 * (field // 2)};"
    if field % 2 == 0:
        return [move, "lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea;"]
    # Float16 has room for the bits one field higher: 1024 + 16 q, whose sixteenth, plus 960, is 1024 + q.
    return [move, "lop3.b32 t, t, 0x00f000f0, 0x64006400, 0xea;", "mov.b32 f, 0x2c002c00;", "mov.b32 u, 0x63806380;",
            "fma.rn.f16x2 $0, t, f, u;"]


def _int8(field: int, half: bool) -> list[str]:
    if half:
        return [f"shr.b32 t, $1, {8 * field};", "lop3.b32 t, t, 0x00ff00ff, 0x64006400, 0xea;",
                "mov.b32 f, 0xe480e480;", "add.rn.f16x2 $0, t, f;"]  # less 1152
    return ["mov.b32 f, 0x4b000000;", f"prmt.b32 t, $1, f, {hex(0x7440 + field)};",
            f"prmt.b32 u, $1, f, {hex(0x7442 + field)};", "add.rn.f32 t, t, 0fCB000080;",
            "add.rn.f32 u, u, 0fCB000080;", "cvt.rn.bf16x2.f32 $0, u, t;"]


def _fp8(field: int, half: bool) -> list[str]:
    move = 7 if half else 4  # from fp8's seven bits in the low byte to below the sign of a 16-bit float's exponent
    if field:
        bits = ["and.b32 u, $1, 0x80008000;", f"shr.b32 t, $1, {8 - move};"]
    else:
        bits = ["shl.b32 u, $1, 8;", "and.b32 u, u, 0x80008000;", f"shl.b32 t, $1, {move};"]
    bits.append(f"lop3.b32 t, t, {hex((127 << move) * 0x10001)}, u, 0xea;")
    if half:
        return [*bits, "mov.b32 f, 0x5c005c00;", "mul.rn.f16x2 $0, t, f;"]
    return [*bits, "mov.b32 f, 0x7b807b80;", "mov.b32 u, 0x80008000;", "fma.rn.bf16x2 $0, t, f, u;"]
