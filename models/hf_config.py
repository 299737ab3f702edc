"""Read the fields that all families share from a checkpoint's config.json."""

from typing import Any

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.models.config import ModelConfig, RopeConfig

_ROPE_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def common_config(hf: dict[str, Any], **changes: Any) -> ModelConfig:
    """ModelConfig from the usual keys; `changes` are the family's own fields.

    Raises:
        CheckpointError: a key is missing, of the wrong type, or sizes do not fit one another.
        UnsupportedModelError: an activation or a rotary scaling that is not supported.
    """
    heads, model_dim = _size(hf, "num_attention_heads"), _size(hf, "hidden_size")
    kv_heads = _size(hf, "num_key_value_heads", heads)
    head_dim = _size(hf, "head_dim", model_dim // heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
                              f"({kv_heads})")
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim ({head_dim}) must be even")
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"config.json: hidden_act {activation!r} is not supported; only 'silu' is")
    eos = hf.get("eos_token_id")
    bias = bool(hf.get("attention_bias", False))
    fields: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "num_layers": _size(hf, "num_hidden_layers"),
        "model_dim": model_dim,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_dim": _size(hf, "intermediate_size"),
        "vocab_size": _size(hf, "vocab_size"),
        "max_model_len": _size(hf, "max_position_embeddings"),
        "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "rope": rope_config(hf),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "eos_token_ids": tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
        "checkpoint_dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
    }
    return ModelConfig(**(fields | changes))


def rope_config(hf: dict[str, Any]) -> RopeConfig:
    """Rotary settings in their old form (rope_theta, rope_scaling) or the new one (rope_parameters)."""
    table = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = float(table.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = str(table.get("rope_type") or table.get("type") or "default")
    if kind not in _ROPE_NUMBERS:
        raise UnsupportedModelError(f"config.json: rotary scaling {kind!r} is not supported; "
                                    f"supported are {', '.join(_ROPE_NUMBERS)}")
    try:
        scaling = tuple((name, float(table[name])) for name in _ROPE_NUMBERS[kind])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: rotary scaling {kind!r} needs the numbers "
                              f"{', '.join(_ROPE_NUMBERS[kind])}") from error
    return RopeConfig(theta, kind, scaling)


def _size(hf: dict[str, Any], name: str, default: int | None = None) -> int:
    value = hf.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value
