"""The model's shape, frozen, as its definition needs it; made from the checkpoint's config.json."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency `theta`, and the scaling of long-context checkpoints.

    `scaling` is the checkpoint's own table of numbers, kept as sorted pairs so that the config stays hashable.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder; axis letters as in the array comments (D, N, K, H, F, V)."""

    architecture: str
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    max_model_len: int
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = "float32"

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed."""
        return replace(self, **changes)
