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
    qk_norm: bool = False  # each head's queries and keys are normed before they are rotated
    # Attention, see AttentionRule: scale of the products (None: H ** -0.5), the window of each layer (empty: no layer
    # has one), bound on scores, ALiBi instead of rotary positions, learned sinks.
    attention_scale: float | None = None
    windows: tuple[int | None, ...] = ()
    attention_softcap: float | None = None
    alibi: bool = False
    attention_sinks: bool = False
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = "float32"

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed."""
        return replace(self, **changes)

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer; None if it sees everything before."""
        return self.windows[layer] if self.windows else None
