"""The Mixtral family: Mistral with a mixture of experts in every layer."""

from typing import Any

from jaxpaged.models import llama, mistral
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, layer_windows, with_defaults
from jaxpaged.models.mixture_config import COUNTS, experts_spec
from jaxpaged.models.weight_rules import TensorSlice, WeightRule, experts, fused_experts, transposed, whole

DEFAULTS: dict[str, Any] = mistral.DEFAULTS | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
}
IGNORED = llama.IGNORED
_LAYER = "model.layers.{i}.block_sparse_moe"
WEIGHTS = (
    *llama.WEIGHTS,
    WeightRule(TensorSlice(f"{_LAYER}.gate.weight", whole, other="model.layers.{i}.mlp.gate.weight"),
               "layers.{i}.mlp.router.kernel", transposed),
    *experts(_LAYER, gate="w1", up="w3", down="w2"), *fused_experts("model.layers.{i}.mlp"))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Mixtral checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    spec = experts_spec(hf, "intermediate_size", default_count="num_local_experts", normalized=True)
    return common_config(hf, windows=layer_windows(hf), reads=("sliding_window", "layer_types", *COUNTS),
                         experts=lambda layer: spec)
