"""What a config.json may say that would be wrong to ignore."""

from collections.abc import Collection
from typing import Any

from jaxpaged.core.errors import UnsupportedModelError
from jaxpaged.core.quantization_methods import IN_CONFIG

_ABSENT = None, False, 0
# Keys that change what a model computes, and the values of each that change nothing. A family that reads one names it
# in `reads`; in a file of any other it is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # which part of a head is rotated, how its pairs lie, in which layers
    "partial_rotary_factor": (None, 1), "rotary_pct": (None, 1), "rotary_emb_fraction": (None, 1),
    "rope_ratio": (None, 1), "rope_interleave": _ABSENT, "rope_interleaved": _ABSENT, "rope_local_base_freq": (None,),
    "no_rope_layers": (None, []), "no_rope_layer_interval": _ABSENT, "use_mrope": _ABSENT, "alibi": _ABSENT,
    "use_alibi": _ABSENT, "position_embedding_type": (None, "rope", "rotary", "absolute"),
    # factors and caps
    "embedding_multiplier": (None, 1), "scale_emb": (None, 1), "residual_multiplier": (None, 1),
    "attention_multiplier": (None,), "query_pre_attn_scalar": (None,), "logits_scaling": (None, 1),
    "logit_scale": (None, 1), "lm_head_multiplier": (None, 1), "scale_depth": (None,), "dim_model_base": (None,),
    "lm_head_bias": _ABSENT, "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,), "clip_qkv": (None,),
    # norms and blocks
    "use_qk_norm": _ABSENT, "qk_norm": _ABSENT, "qk_layernorm": _ABSENT, "use_parallel_residual": _ABSENT,
    "parallel_attn": _ABSENT, "attn_output_gate": _ABSENT, "hidden_activation": (None,),
    # what attention sees
    "is_causal": (None, True), "use_bidirectional_attention": _ABSENT, "is_encoder_decoder": _ABSENT,
    "add_cross_attention": _ABSENT, "sparse_config": _ABSENT,
    "attention_chunk_size": _ABSENT, "attn_temperature_tuning": _ABSENT, "layer_types": (None,),
    "sliding_window": _ABSENT, "num_kv_shared_layers": _ABSENT,
    # latent attention, experts
    "kv_lora_rank": _ABSENT, "q_lora_rank": _ABSENT, "num_experts": _ABSENT, "num_local_experts": _ABSENT,
    "n_routed_experts": _ABSENT, "moe_num_experts": _ABSENT,
}


def check_unread(hf: dict[str, Any], reads: Collection[str]) -> None:
    """Refuse a key that changes the result and that the family does not read.

    Raises:
        UnsupportedModelError: the text names the key and its value.
    """
    for name, neutral in NEUTRAL.items():
        value = hf.get(name)
        if name in reads or value in neutral or _changes_nothing(name, value):
            continue
        raise UnsupportedModelError(
            f"config.json: {name} is {_brief(value)}, which changes what a model computes and is not supported here; "
            f"if the weights do not need it, start with --hf-overrides '{{\"{name}\": null}}'")


QUANTIZATION_KEYS = "quantization_config", "compression_config"


def quantization_table(hf: dict[str, Any]) -> Any:
    """What a config.json says of its weights' quantization; None: they are plain."""
    return next((hf[key] for key in QUANTIZATION_KEYS if hf.get(key)), None)


def check_quantization(hf: dict[str, Any], key: str = "", says: str = "") -> None:
    """Refuse weights that are quantized by a method that cannot be read.

    Args:
        key: where in `hf` the method is described, if not as in a config.json.
        says: what to begin the error with, if not with config.json.

    Raises:
        UnsupportedModelError: the text names the method.
    """
    for name in (key,) if key else QUANTIZATION_KEYS:
        if hf.get(name) and quantization_name(hf[name]) not in IN_CONFIG:
            raise UnsupportedModelError(
                f"{says or f'config.json: {name} says'} that the weights are quantized by "
                f"{quantization_method(hf[name])}, which is not supported; supported are {', '.join(IN_CONFIG)}, "
                "checkpoints without quantization, and GGUF files. If these weights are plain after all, "
                + (f"remove the file or start with --hf-overrides '{{\"{QUANTIZATION_KEYS[0]}\": null}}'" if key else
                   f"start with --hf-overrides '{{\"{name}\": null}}'"))


def quantization_name(table: Any) -> str:
    """The method that a quantization_config or quantize_config.json names, in lower case."""
    if isinstance(table, dict) and isinstance(table.get("quantization"), dict):
        table = table["quantization"]  # as ModelOpt writes it
    if not isinstance(table, dict):
        return "an unknown method"
    method = table.get("quant_method") or table.get("quant_algo")
    if method is None:  # older files say only how, not by what
        method = ("bitsandbytes" if table.keys() & {"load_in_4bit", "load_in_8bit"} else
                  "awq" if "zero_point" in table or "version" in table else
                  "gptq" if table.keys() & {"desc_act", "bits", "w_bit"} else "an unknown method")
    elif "quant_method" not in table:
        return f"modelopt's {_brief(method).strip(chr(39))}"
    return _brief(method).strip("'").lower()


def quantization_method(table: Any) -> str:
    """The method, with its bits if the table has them."""
    if not isinstance(table, dict):
        return quantization_name(table)
    inner = table["quantization"] if isinstance(table.get("quantization"), dict) else table
    bits = inner.get("bits") or inner.get("w_bit") or inner.get("wbits")
    return f"{quantization_name(table)} ({bits} bits)" if isinstance(bits, int) else quantization_name(table)


def _changes_nothing(name: str, value: Any) -> bool:
    if name == "layer_types":
        return isinstance(value, list) and all(item == "full_attention" for item in value)
    if name == "no_rope_layers":  # 0 marks a layer without
        return isinstance(value, list) and all(item == 1 for item in value)
    return False


def _brief(value: object) -> str:
    return repr(value)[:64]
