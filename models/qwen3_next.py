"""The Qwen3-Next family: gated delta nets, every fourth layer gated attention, and mixtures of experts."""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.models import llama, qwen2_moe, qwen3
from jaxpaged.models.config import AttentionSpec, DeltaSpec, ModelConfig
from jaxpaged.models.hf_config import common_config, norm_spec, size, with_defaults
from jaxpaged.models.mixture_config import COUNTS, experts_spec, sparse_layers
from jaxpaged.models.weight_rules import TensorSlice, WeightRule, as_is, rotated, transposed, whole

DEFAULTS: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "eos_token_id": None, "tie_word_embeddings": False, "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
    "attention_bias": False, "layer_types": None, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "decoder_sparse_step": 1,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10,
    "num_experts": 512, "norm_topk_prob": True, "mlp_only_layers": None,
}
IGNORED = (*llama.IGNORED, "mtp.*")
READS = ("partial_rotary_factor", "layer_types", "attn_output_gate")


def _part_of_heads(part: int) -> Any:
    """Rows of the queries, or of their gates, of which a tensor has one after the other for each head."""
    def rows(spec: AttentionSpec) -> np.ndarray:
        return np.arange(2 * spec.num_heads * spec.head_dim).reshape(-1, 2, spec.head_dim)[:, part].reshape(-1)

    return rows


def _part_of_groups(*parts: str) -> tuple[Any, ...]:
    """Rows of each of these, of which a tensor has for each key head all, one after the other."""
    def rows(index: int, spec: DeltaSpec) -> np.ndarray:
        widths = [getattr(spec, part) // spec.key_heads for part in parts]
        groups = np.arange(spec.key_heads * sum(widths)).reshape(spec.key_heads, -1)
        return groups[:, sum(widths[:index]) : sum(widths[: index + 1])].reshape(-1)

    return tuple(lambda spec, index=index: rows(index, spec) for index in range(len(parts)))


_ATTN, _DELTA = "model.layers.{i}.self_attn", "model.layers.{i}.linear_attn"
_QUERIES, _GATES = (TensorSlice(f"{_ATTN}.q_proj.weight", whole, axis, _part_of_heads(part))
                    for part, axis in ((0, 0), (1, None)))
GATED_ATTENTION = (
    WeightRule((_QUERIES, rotated(f"{_ATTN}.k_proj.weight"), f"{_ATTN}.v_proj.weight"), "layers.{i}.attn.qkv.kernel",
               transposed, (None, ("heads", "kv_heads", "kv_heads"))),
    WeightRule(_GATES, "layers.{i}.attn.gate.kernel", transposed, (None, "heads")), *qwen3.HEAD_NORMS)
INPUT_AXES = (None, ("state_keys", "state_keys", "state_values", "state_values"))
RATE_AXES = (None, ("state_heads", "state_heads"))
DELTA = (
    WeightRule(f"{_DELTA}.conv1d.weight", "layers.{i}.attn.conv", lambda tensor: tensor[:, 0],
               (("state_keys", "state_keys", "state_values"), None)),
    WeightRule(f"{_DELTA}.A_log", "layers.{i}.attn.log_decay", as_is, ("state_heads",)),
    WeightRule(f"{_DELTA}.dt_bias", "layers.{i}.attn.decay_bias", as_is, ("state_heads",)),
    WeightRule(f"{_DELTA}.norm.weight", "layers.{i}.attn.norm.scale", as_is),
    WeightRule(f"{_DELTA}.out_proj.weight", "layers.{i}.attn.out.kernel", transposed, ("state_values", None)))
WEIGHTS = (
    *GATED_ATTENTION, *DELTA,
    WeightRule(tuple(TensorSlice(f"{_DELTA}.in_proj_qkvz.weight", whole, rows=rows)
                     for rows in _part_of_groups("keys", "keys", "values", "values")),
               "layers.{i}.attn.inputs.kernel", transposed, INPUT_AXES),
    WeightRule(tuple(TensorSlice(f"{_DELTA}.in_proj_ba.weight", whole, rows=rows)
                     for rows in _part_of_groups("value_heads", "value_heads")),
               "layers.{i}.attn.rates.kernel", transposed, RATE_AXES),
    *qwen2_moe.WEIGHTS)


def hybrid_config(hf: dict[str, Any], **more: Any) -> ModelConfig:
    """The config of a model with delta nets, where `layer_types` says so or in three of four layers."""
    norm = norm_spec(hf, plus_one=True)
    config = common_config(hf, attention={"qk_norm": norm, "gated": True}, mlp={"bias": False}, norm=norm, **more)
    count, every = config.num_layers, size(hf, "full_attention_interval", 4)
    kinds = hf["layer_types"] or ["full_attention" if (layer + 1) % every == 0 else "linear_attention"
                                  for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or "full_attention" not in kinds or not all(
            kind in ("full_attention", "linear_attention") for kind in kinds):
        raise CheckpointError(f"config.json: layer_types must be a list of {count} (num_hidden_layers), each "
                              "full_attention or linear_attention, and one full_attention at least")
    key_heads, value_heads = size(hf, "linear_num_key_heads"), size(hf, "linear_num_value_heads")
    if value_heads % key_heads:
        raise CheckpointError(f"config.json: linear_num_value_heads ({value_heads}) must be a multiple of "
                              f"linear_num_key_heads ({key_heads})")
    delta = DeltaSpec(key_heads, value_heads, size(hf, "linear_key_head_dim"), size(hf, "linear_value_head_dim"),
                      size(hf, "linear_conv_kernel_dim"), norm.eps)
    return config.replace(layers=tuple(
        replace(layer, mixer=delta if kind == "linear_attention" else layer.mixer)
        for kind, layer in zip(kinds, config.layers, strict=True)))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3-Next checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    spec = experts_spec(hf, "moe_intermediate_size", shared_dim=size(hf, "shared_expert_intermediate_size"),
                        shared_gate=True)
    sparse = sparse_layers(hf)
    return hybrid_config(hf, reads=(*READS, *COUNTS), experts=lambda layer: spec if layer in sparse else None)
