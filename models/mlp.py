"""Dense MLPs.

Axis letters: T tokens, D model, F mlp.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.config import MLPSpec
from jaxpaged.models.layers import Linear, MeshAxes

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class DenseMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020), or down(activation(up(x))) without a gate."""

    def __init__(
        self, spec: MLPSpec, model_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None
    ) -> None:
        make = partial(Linear, bias=spec.bias, dtype=dtype, rngs=rngs)
        self.gate_up = make(model_dim, 2 * spec.dim) if spec.gated else None
        self.up = None if spec.gated else make(model_dim, spec.dim)
        self.down = make(spec.dim, model_dim, sum_over=axis)
        self.activation = spec.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        activate = ACTIVATIONS[self.activation]
        if self.up is not None:
            return self.down(activate(self.up(x)))
        assert self.gate_up is not None
        if self.gate_up.native and self.gate_up.bias is None and self.activation == "silu":
            return self.down(self.gate_up.gated(x))
        gate, up = jnp.split(self.gate_up(x), 2, axis=1)
        return self.down(activate(gate) * up)
