"""Read the fields that all families share from a checkpoint's config.json."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.models.config import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec, RopeConfig

# transformers' names of activations, and ours.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
               "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2"}

_ROPE_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


def common_config(
    hf: dict[str, Any], *, attention: dict[str, Any] | None = None, mlp: dict[str, Any] | None = None,
    windows: Sequence[int | None] = (), **changes: Any,
) -> ModelConfig:
    """ModelConfig from the usual keys: equal Llama layers, but for what the family changes.

    Args:
        attention, mlp: fields of `AttentionSpec` and `MLPSpec` that differ from Llama's.
        windows: the sliding window of each layer; empty: no layer has one.
        changes: fields of ModelConfig.

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
    bias = bool(hf.get("attention_bias", False))
    mixer = AttentionSpec(heads, kv_heads, head_dim, rope_config(hf), bias, bias)
    mixer = replace(mixer, **attention or {})
    dense = replace(MLPSpec(_size(hf, "intermediate_size"), _activation(hf), bias=bool(hf.get("mlp_bias", False))),
                    **mlp or {})
    norm = norm_spec(hf)
    layers = tuple(LayerSpec(replace(mixer, window=window), dense, norm)
                   for window in windows or (None,) * _size(hf, "num_hidden_layers"))
    fields: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "model_dim": model_dim,
        "vocab_size": _size(hf, "vocab_size"),
        "max_model_len": _context(hf),
        "layers": layers,
        "norm": norm,
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "eos_token_ids": eos_ids(hf, "config.json"),
        "checkpoint_dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
    }
    return ModelConfig(**(fields | changes))


def norm_spec(hf: dict[str, Any]) -> NormSpec:
    """Llama's norm, with the eps of the checkpoint."""
    return NormSpec(_number(hf, "rms_norm_eps", 1e-6))


def _activation(hf: dict[str, Any]) -> str:
    name = hf.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"config.json: hidden_act {name!r} is not supported; supported are "
                                    f"{', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def eos_ids(config: dict[str, Any], file: str) -> tuple[int, ...]:
    """The ids that end a text, by a config.json or generation_config.json; negative ones mean none.

    Raises:
        CheckpointError: `eos_token_id` is neither an id nor a list of them.
    """
    value = config.get("eos_token_id")
    items = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise CheckpointError(f"{file}: eos_token_id must be an integer or a list of integers")
    return tuple(item for item in items if item >= 0)


def rope_config(hf: dict[str, Any]) -> RopeConfig:
    """Rotary settings in their old form (rope_theta, rope_scaling) or the new one (rope_parameters)."""
    table = _rope_table(hf)
    theta = _number(table if table.get("rope_theta") else hf, "rope_theta", 10000.0)
    kind = _rope_kind(table)
    if kind not in _ROPE_NUMBERS:
        raise UnsupportedModelError(f"config.json: rotary scaling {kind!r} is not supported; "
                                    f"supported are {', '.join(_ROPE_NUMBERS)}")
    try:
        if kind == "yarn":
            table = _yarn_numbers(hf, table)
        scaling = tuple((name, float(table[name])) for name in _ROPE_NUMBERS[kind])
        if not all(math.isfinite(value) for _, value in scaling):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: rotary scaling {kind!r} needs the numbers "
                              f"{', '.join(_ROPE_NUMBERS[kind])}") from error
    return RopeConfig(theta, kind, scaling)


def layer_windows(hf: dict[str, Any], first: int = 0) -> tuple[int | None, ...]:
    """The sliding window of each layer; empty where no layer has one.

    Args:
        first: the first layer that has one, where the config lists no layer_types.

    Raises:
        UnsupportedModelError: a layer of another type.
    """
    if hf.get("sliding_window") is None or _size(hf, "sliding_window") >= _context(hf):
        return ()  # no token ever leaves it
    layers = _size(hf, "num_hidden_layers")
    types = hf.get("layer_types") or ["sliding_attention" if layer >= first else "full_attention"
                                      for layer in range(layers)]
    windows = {"full_attention": None, "sliding_attention": _size(hf, "sliding_window")}
    if not isinstance(types, list) or len(types) != layers or not all(item in windows for item in types):
        raise UnsupportedModelError(f"config.json: layer_types must be a list of {layers}, each one of "
                                    f"{', '.join(windows)}; others are not supported")
    return tuple(windows[item] for item in types)


def _rope_table(hf: dict[str, Any]) -> dict[str, Any]:
    table = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(table, dict):
        raise CheckpointError("config.json: rope_parameters, or rope_scaling, must be an object")
    return table


def _rope_kind(table: dict[str, Any]) -> str:
    return str(table.get("rope_type") or table.get("type") or "default")


def _yarn_numbers(hf: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """With what is left out filled in (Peng et al., 2023)."""
    factor = float(table["factor"])

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    attention_factor = table.get("attention_factor")
    if attention_factor is None:
        part, whole = table.get("mscale"), table.get("mscale_all_dim")
        attention_factor = magnitude(part) / magnitude(whole) if part and whole else magnitude(1)
    return {"factor": factor, "attention_factor": attention_factor, "truncate": table.get("truncate", True),
            "beta_fast": table.get("beta_fast") or 32, "beta_slow": table.get("beta_slow") or 1,
            "original_max_position_embeddings": table.get("original_max_position_embeddings")
            or hf["max_position_embeddings"]}


def _context(hf: dict[str, Any]) -> int:
    """The longest text; YaRN's is its factor times what the model was first made for, if that is longer."""
    given, table = _size(hf, "max_position_embeddings"), _rope_table(hf)
    if _rope_kind(table) != "yarn":
        return given
    scaling = dict(rope_config(hf).scaling)
    return max(given, int(scaling["factor"] * scaling["original_max_position_embeddings"]))


def _number(hf: dict[str, Any], name: str, default: float) -> float:
    value = default if hf.get(name) is None else hf[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name} must be a positive number, not {value!r}")
    return float(value)


def _size(hf: dict[str, Any], name: str, default: int | None = None) -> int:
    value = hf.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value
