"""The Qwen2-MoE family, Qwen1.5-MoE included: Qwen2 with mixtures of experts and a gated MLP that all tokens share."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, layer_types, layer_windows, size, with_defaults
from jaxpaged.models.mixture_config import COUNTS, experts_spec, sparse_layers
from jaxpaged.models.weight_rules import WeightRule, experts, fused_experts, router, shared_mlp, transposed

DEFAULTS: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "eos_token_id": None,
    "tie_word_embeddings": False, "rope_theta": 10000.0, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False,
    "mlp_only_layers": None, "qkv_bias": True,
}
IGNORED = llama.IGNORED
ROUTER = router("model.layers.{i}.mlp.gate.weight")
WEIGHTS = (
    *llama.WEIGHTS, ROUTER, *experts("model.layers.{i}.mlp", "gate_proj", "up_proj", "down_proj"),
    *fused_experts("model.layers.{i}.mlp"),
    *shared_mlp("model.layers.{i}.mlp.shared_expert"),
    WeightRule("model.layers.{i}.mlp.shared_expert_gate.weight", "layers.{i}.mlp.shared_gate.kernel", transposed))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen2-MoE checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    spec = experts_spec(hf, "moe_intermediate_size", shared_dim=size(hf, "shared_expert_intermediate_size"),
                        shared_gate=True)
    sparse = sparse_layers(hf)
    return common_config(hf, attention={"bias": flag(hf, "qkv_bias"), "output_bias": False}, mlp={"bias": False},
                         windows=_windows(hf), reads=("sliding_window", "layer_types", *COUNTS),
                         experts=lambda layer: spec if layer in sparse else None)


def _windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """Where they are switched on, every other layer before max_window_layers has one."""
    if not hf["use_sliding_window"]:
        return ()
    last = size(hf, "max_window_layers")
    return layer_windows(hf | {"layer_types": layer_types(hf, lambda layer: layer % 2 == 0 and layer < last)})
