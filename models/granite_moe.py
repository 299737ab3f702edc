"""The Granite 3 family with mixtures of experts."""

from typing import Any

from jaxpaged.models import granite, llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import with_defaults
from jaxpaged.models.mixture_config import COUNTS, experts_spec
from jaxpaged.models.weight_rules import fused_experts, router

DEFAULTS: dict[str, Any] = {key: value for key, value in granite.DEFAULTS.items() if key != "mlp_bias"} | {
    "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
IGNORED = llama.IGNORED
_LAYER = "model.layers.{i}.block_sparse_moe"
WEIGHTS = (*llama.WEIGHTS, router(f"{_LAYER}.router.layer.weight"),
           *fused_experts(_LAYER, "input_linear.weight", "output_linear.weight"))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Granite MoE checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    spec = experts_spec(hf, "intermediate_size", default_count="num_local_experts", normalized=True)
    return granite.granite_config(hf, COUNTS, experts=lambda layer: spec)
