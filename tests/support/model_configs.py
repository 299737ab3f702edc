"""Model configs that no checkpoint has: layers of any shape, attention and window."""

from dataclasses import replace
from typing import Any

from jaxpaged.models.config import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec


def uniform_layers(count: int, *, heads: int, kv_heads: int, head_dim: int, mlp_dim: int, norm_eps: float = 1e-5,
                   **attention: Any) -> tuple[LayerSpec, ...]:
    """`count` equal Llama layers."""
    layer = LayerSpec(AttentionSpec(heads, kv_heads, head_dim, **attention), MLPSpec(mlp_dim), NormSpec(norm_eps))
    return (layer,) * count


def with_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A copy with fields of every layer's attention changed."""
    return replace(config, layers=tuple(
        replace(layer, mixer=replace(layer.mixer, **changes)) for layer in config.layers))


def with_windows(config: ModelConfig, windows: tuple[int | None, ...]) -> ModelConfig:
    """A copy with the sliding window of each layer; fewer windows than layers are repeated in turn."""
    return replace(config, layers=tuple(
        replace(layer, mixer=mixer.of_layer(mixer.rope, windows[index % len(windows)]))
        for index, (layer, mixer) in enumerate(zip(config.layers, config.attention, strict=True))))
