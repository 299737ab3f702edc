"""Read the fields that all families share from a checkpoint's config.json."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.models.config import (
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    NormSpec,
    RopeConfig,
    TokenSpec,
)
from jaxpaged.models.config_checks import check_quantization, check_unread
from jaxpaged.models.rope_tables import context_length, rope_config, stretched_length
from jaxpaged.models.text_part import text_config

# transformers' names of activations, and ours.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
               "gelu_fast": "gelu_tanh",
               "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2"}

_MAX_LAYERS = 10_000
# Where null has a meaning of its own; elsewhere it is the same as an absent key.
_NULLABLE = ("eos_token_id", "head_dim", "num_key_value_heads", "sliding_window", "attn_logit_softcapping",
             "final_logit_softcapping", "q_lora_rank")


def with_defaults(hf: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A config.json with the family's defaults, transformers' own, where it says nothing.

    Its `architectures` are the family's: a file may leave them out, or name others besides.
    """
    given = {key: value for key, value in text_config(hf).items() if value is not None or key in _NULLABLE}
    return defaults | given | {"architectures": defaults["architectures"]}


def renamed_sizes(hf: dict[str, Any], names: Mapping[str, str], default: int | None = None) -> dict[str, Any]:
    """A config.json with sizes under their usual names, too.

    Args:
        names: the usual name of each.
        default: where the file has null.
    """
    return hf | {usual: size(hf, own, default) for own, usual in names.items()}


# Of families in which each head of queries has one of keys, as wide as what the heads share out.
MULTI_HEAD: dict[str, Any] = {"num_key_value_heads": None, "head_dim": None}


def common_config(
    hf: dict[str, Any], *, attention: dict[str, Any] | None = None, mlp: dict[str, Any] | None = None,
    layer: dict[str, Any] | None = None, rope: dict[str, Any] | None = None, norm: NormSpec | None = None,
    windows: Sequence[int | None] = (), rotated: bool = True, unrotated: Collection[int] = (),
    experts: Callable[[int], ExpertsSpec | None] = lambda layer: None, latent: LatentSpec | None = None,
    reads: Collection[str] = (), **changes: Any,
) -> ModelConfig:
    """ModelConfig from the usual keys: equal Llama layers, but for what the family changes.

    Args:
        hf: config.json, see `with_defaults`.
        attention, mlp, layer, rope: fields of `AttentionSpec`, `MLPSpec`, `LayerSpec` and `RopeConfig` that differ from
            Llama's.
        norm: of all layers, and before the head; by default Llama's.
        rotated: whether queries and keys are rotated.
        unrotated: numbers of the layers in which they are not.
        experts: of a layer's number, the mixture that it has in place of the dense MLP.
        latent: what all layers have in place of grouped-query attention.
        reads: keys of `config_checks.NEUTRAL` that the family reads itself.
        windows: the sliding window of each layer; empty: no layer has one.
        changes: fields of ModelConfig.

    Raises:
        CheckpointError: a key is missing, of the wrong type, or sizes do not fit one another.
        UnsupportedModelError: an activation, a rotary scaling or a quantization that is not supported, or a key that
            changes the result and is not read.
    """
    check_quantization(hf)
    check_unread(hf, reads)
    heads, model_dim = size(hf, "num_attention_heads"), size(hf, "hidden_size")
    kv_heads = size(hf, "num_key_value_heads", heads)
    head_dim = model_dim // heads if hf.get("head_dim") is None else size(hf, "head_dim")
    if heads % kv_heads:
        raise CheckpointError(f"config.json: num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
                              f"({kv_heads})")
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"config.json: head_dim ({head_dim}), which is hidden_size // num_attention_heads unless "
                              "given, must be even")
    bias = flag(hf, "attention_bias")
    mixer: TokenSpec = latent or replace(AttentionSpec(heads, kv_heads, head_dim, None, bias, bias), **attention or {})
    dense = replace(MLPSpec(size(hf, "intermediate_size"), activation(hf, "hidden_act"), bias=flag(hf, "mlp_bias")),
                    **mlp or {})
    norm = norm or norm_spec(hf)
    partial = "partial_rotary_factor" in reads

    def rotary(index: int, kind: str) -> RopeConfig | None:
        skipped = index in unrotated or not rotated
        found = None if skipped else rope_config(hf, kind, mixer.rotary_dim, partial=partial)
        return replace(found, **rope or {}) if found else None

    layers = tuple(LayerSpec(mixer.of_layer(rotary(index, kind), window), experts(index) or dense, norm, **layer or {})
                   for index, (kind, window) in enumerate(_layers(hf, windows)))
    fields: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "model_dim": model_dim,
        "vocab_size": size(hf, "vocab_size"),
        "max_model_len": _context(hf) if rotated else size(hf, "max_position_embeddings"),
        "max_stretched_len": stretched_length(hf, _context(hf)) if rotated else None,
        "layers": layers,
        "norm": norm,
        "tie_embeddings": flag(hf, "tie_word_embeddings"),
        "eos_token_ids": eos_ids(hf, "config.json"),
        "checkpoint_dtype": named_dtype(hf) or "float32",
    }
    return ModelConfig(**(fields | changes))


def named_dtype(hf: dict[str, Any]) -> str | None:
    """The dtype of the weights that a config.json names; "auto" names none."""
    found = hf.get("dtype") or hf.get("torch_dtype")
    return None if found in (None, "auto") else str(found).removeprefix("torch.")


def norm_spec(hf: dict[str, Any], key: str = "rms_norm_eps", **fields: Any) -> NormSpec:
    """Llama's norm with the eps of the checkpoint, under `key`, and other fields of `NormSpec`."""
    return NormSpec(number(hf, key, 1e-6), **fields)


def softcap(hf: dict[str, Any], key: str) -> float | None:
    """A bound c on c * tanh(x / c); null: none."""
    return None if hf.get(key) is None else number(hf, key, 1.0)


def pattern_length(hf: dict[str, Any], default: int) -> int:
    """Of so many layers one has no window."""
    return size(hf, "sliding_window_pattern", default)


def layer_types(hf: dict[str, Any], windowed: Callable[[int], bool]) -> list[str]:
    """The type of each layer; where config.json does not say, `windowed` says which layers have a window.

    Raises:
        CheckpointError: it is not a list of as many as there are layers.
    """
    count, found = _num_layers(hf), hf.get("layer_types")
    if not found:
        return ["sliding_attention" if windowed(layer) else "full_attention" for layer in range(count)]
    if not isinstance(found, list) or len(found) != count:
        raise CheckpointError(f"config.json: layer_types must be a list of {count}")
    return found


def all_but_every(count: int) -> Callable[[int], bool]:
    """For `layer_types`: every `count`-th layer has no window."""
    return lambda layer: (layer + 1) % count != 0


def activation(hf: dict[str, Any], key: str) -> str:
    """Our name of the activation that config.json names under `key`.

    Raises:
        UnsupportedModelError: there is no such activation.
    """
    name = hf.get(key, "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(f"config.json: {key} {name!r} is not supported; supported are "
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


def layer_windows(hf: dict[str, Any], first: int = 0) -> tuple[int | None, ...]:
    """The sliding window of each layer; empty where no layer has one.

    Args:
        first: the first layer that has one, where the config lists no layer_types.

    Raises:
        UnsupportedModelError: a layer of another type.
    """
    if hf.get("sliding_window") is None or size(hf, "sliding_window") >= _context(hf):
        return ()  # no token ever leaves it
    layers = _num_layers(hf)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise CheckpointError(f"config.json: max_window_layers must be a number of layers, not {first!r}")
    types = hf.get("layer_types") or ["sliding_attention" if layer >= first else "full_attention"
                                      for layer in range(layers)]
    windows = {"full_attention": None, "sliding_attention": size(hf, "sliding_window")}
    if not isinstance(types, list) or len(types) != layers or not all(item in windows for item in types):
        raise UnsupportedModelError(f"config.json: layer_types must be a list of {layers}, each one of "
                                    f"{', '.join(windows)}; others are not supported")
    return tuple(windows[item] for item in types)


def _layers(hf: dict[str, Any], windows: Sequence[int | None]) -> list[tuple[str, int | None]]:
    """Type and window of each layer."""
    count = _num_layers(hf)
    found = list(windows) or [None] * count
    kinds = ["full_attention" if window is None else "sliding_attention" for window in found]
    types = hf.get("layer_types")  # a window that no token leaves is none, but such a layer may be rotated otherwise
    return list(zip(types if isinstance(types, list) and len(types) == count else kinds, found, strict=True))


def _num_layers(hf: dict[str, Any]) -> int:
    count = size(hf, "num_hidden_layers")
    if count > _MAX_LAYERS:
        raise CheckpointError(f"config.json: num_hidden_layers is {count}; at most {_MAX_LAYERS} are supported")
    return count


def _context(hf: dict[str, Any]) -> int:
    return context_length(hf, size(hf, "max_position_embeddings"))


def flag(hf: dict[str, Any], name: str) -> bool:
    """Whether config.json sets a flag.

    Raises:
        CheckpointError: it is something else.
    """
    value = hf.get(name)
    if value not in (None, True, False):
        raise CheckpointError(f"config.json: {name} must be true or false, not {value!r}")
    return bool(value)


def number(hf: dict[str, Any], name: str, default: float) -> float:
    """A positive number of config.json.

    Raises:
        CheckpointError: it is something else.
    """
    value = default if hf.get(name) is None else hf[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise CheckpointError(f"config.json: {name} must be a positive number, not {value!r}")
    return float(value)


def size(hf: dict[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer of config.json.

    Raises:
        CheckpointError: it is something else.
    """
    value = hf.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise CheckpointError(f"config.json: {name} must be a positive integer, not {value!r:.64}")
    return value
