"""Which family serves which architecture name of config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.models import llama, mistral, qwen2, qwen3
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import MeshAxes
from jaxpaged.models.transformer import Transformer
from jaxpaged.models.weight_rules import WeightRule


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family: how its config is read, how its module is built, and where its weights come from."""

    config_from_hf: Callable[[dict[str, Any]], ModelConfig]
    weights: tuple[WeightRule, ...]
    ignored: tuple[str, ...]

    def build(self, config: ModelConfig, dtype: jnp.dtype, seed: int = 0, axis: MeshAxes = None) -> Transformer:
        """The module with random weights. For `axis` see there."""
        return Transformer(config, dtype=dtype, rngs=nnx.Rngs(seed), axis=axis)

    def outline(self, config: ModelConfig, dtype: jnp.dtype, axis: MeshAxes = None) -> Transformer:
        """The module with the shapes of its weights alone; nothing is drawn."""
        return nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=_OneKey(), axis=axis))


class _OneKey(nnx.Rngs):
    """The same key for every draw: counting draws takes most of the time that an outline takes."""

    def __init__(self) -> None:
        super().__init__()

    def params(self) -> jax.Array:
        return jax.random.key(0)


_LLAMA = ModelFamily(llama.config_from_hf, llama.WEIGHTS, llama.IGNORED)

_MISTRAL = ModelFamily(mistral.config_from_hf, mistral.WEIGHTS, mistral.IGNORED)

_QWEN2 = ModelFamily(qwen2.config_from_hf, qwen2.WEIGHTS, qwen2.IGNORED)

_QWEN3 = ModelFamily(qwen3.config_from_hf, qwen3.WEIGHTS, qwen3.IGNORED)

FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
}


def find_family(hf: dict[str, Any]) -> ModelFamily:
    """The family of a config.json.

    Raises:
        UnsupportedModelError: no family serves this architecture; the text lists those that exist.
    """
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError("config.json: 'architectures' must be a list that names the model class")
    if names[0] not in FAMILIES:
        raise UnsupportedModelError(f"architecture {names[0]} is not supported; supported are "
                                    f"{', '.join(sorted(FAMILIES))}")
    return FAMILIES[names[0]]
