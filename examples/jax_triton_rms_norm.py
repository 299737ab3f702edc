"""A kernel written in Triton's own language, called from JAX on the same arrays as jaxpaged's: through jax-triton.

    pip install ".[cuda12,triton]"
    python examples/jax_triton_rms_norm.py

jaxpaged itself never takes this way: its kernels are Pallas', which compile for an absent GPU, and jax-triton
lowers only where one is. Take it to try a kernel that exists in Triton already. It needs an NVIDIA GPU, and has not
been run on one yet.
"""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x_ptr, scale_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr):
    """One program per row [SIZE] of x; BLOCK is the next power of two."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    mask = lane < SIZE
    x = tl.load(x_ptr + row * SIZE + lane, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    result = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + EPS) * scale
    tl.store(out_ptr + row * SIZE + lane, result.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float = 1e-5) -> jax.Array:
    """x [T, D], scale [D] -> [T, D]; may be called under `jax.jit`."""
    tokens, size = x.shape
    return jax_triton.triton_call(
        x, scale, kernel=rms_norm_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(tokens,), num_warps=8,
        SIZE=size, BLOCK=triton.next_power_of_2(size), EPS=eps)


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (64, 4096), jnp.bfloat16)
    scale = jnp.full(4096, 0.5, jnp.bfloat16)
    wide = x.astype(jnp.float32)
    wanted = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5) * 0.5
    error = jnp.abs(jax.jit(rms_norm)(x, scale).astype(jnp.float32) - wanted).max()
    print(f"largest error {error:.2g} on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
