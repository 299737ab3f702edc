"""Mixtures of experts, and the one module that picks the path that computes them.

Axis letters: T tokens, k experts of a token, E experts, D model, F mlp.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.config import ExpertsSpec, MLPSpec
from jaxpaged.models.layers import ExpertKernels, Linear, MeshAxes
from jaxpaged.models.mlp import ACTIVATIONS, DenseMLP
from jaxpaged.pallas_kernels import gpu_experts, native_experts, xla_experts
from jaxpaged.pallas_kernels.lowering import GpuTarget
from jaxpaged.pallas_kernels.routing import choose_experts


class Experts(nnx.Module):
    """The weighted sum of what each token's experts make of it, and of a shared MLP if there is one.

    On a mesh each device has a part of every expert. All devices choose the same experts: what they choose by is the
    same on all, bit by bit.
    """

    def __init__(
        self, spec: ExpertsSpec, model_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, axis: MeshAxes = None
    ) -> None:
        make = partial(Linear, model_dim, dtype=dtype, rngs=rngs)
        self.router = make(spec.count, bias=spec.bias)
        self.choice_bias = nnx.Param(jnp.zeros(spec.count, jnp.float32)) if spec.choice_bias else None
        self.expert_gate_up = ExpertKernels(spec.count, model_dim, 2 * spec.dim, bias=spec.bias, dtype=dtype,
                                            rngs=rngs)
        self.expert_down = ExpertKernels(spec.count, spec.dim, model_dim, bias=spec.bias, dtype=dtype, rngs=rngs)
        shared = MLPSpec(spec.shared_dim, spec.activation)
        self.shared = DenseMLP(shared, model_dim, dtype=dtype, rngs=rngs) if spec.shared_dim else None
        self.shared_gate = make(1, bias=False) if spec.shared_gate else None
        self.spec, self.sum_over = spec, axis

    def __call__(self, x: jax.Array, valid: jax.Array, target: GpuTarget | None = None) -> jax.Array:
        """[T, D] -> [T, D].

        Args:
            valid: [T] bool; other rows are padding, for which no expert is read.
            target: the GPU, if it runs on one.
        """
        spec = self.spec
        bias = None if self.choice_bias is None else self.choice_bias[...]
        expert, weight = choose_experts(self.router.logits(x).astype(jnp.float32), bias, spec.routing)
        expert = jnp.where(valid[:, None], expert, spec.count)
        gate_up, down = self.expert_gate_up.weights, self.expert_down.weights
        if target is not None:
            y = gpu_experts.experts(x, expert, weight, gate_up, down, hidden_of(spec), self.expert_gate_up.biases,
                                    target=target)
        elif self.expert_down.native and spec.activation == "silu":
            y = native_experts.experts(x, expert, weight, gate_up, down, self.expert_gate_up.biases, spec.clamp)
        else:
            y = xla_experts.experts(x, expert, weight, gate_up, down, hidden_of(spec), self.expert_gate_up.biases)
        if self.shared is not None:
            y = y + self._share(x) * self.shared(x).astype(jnp.float32)
        y = y.astype(x.dtype)
        y = jax.lax.psum(y, self.sum_over) if self.sum_over else y
        return y if self.expert_down.biases is None else y + self._biases(expert, weight).astype(x.dtype)

    def _biases(self, expert: jax.Array, weight: jax.Array) -> jax.Array:
        """What the biases of the last products add, whole on every device: [T, D] float32."""
        assert self.expert_down.biases is not None
        bias = self.expert_down.biases.astype(jnp.float32)
        found = (weight[:, column, None] * bias.at[expert[:, column]].get(mode="fill", fill_value=0)
                 for column in range(expert.shape[1]))
        return sum(found, jnp.zeros(1, jnp.float32))

    def _share(self, x: jax.Array) -> jax.Array | float:
        """The factor on what the shared MLP adds: [T, 1]."""
        return 1.0 if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate.logits(x).astype(jnp.float32))


def hidden_of(spec: ExpertsSpec) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """What an expert's products with gate and up become."""
    if spec.clamp is None:
        activate = ACTIVATIONS[spec.activation]
        return lambda gate, up: activate(gate) * up
    limit, growth = spec.clamp

    def bounded(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(growth * gate) * (jnp.clip(up, -limit, limit) + 1)

    return bounded
