"""The Qwen3 family, dense: Qwen2 without biases, and with norms of each head's queries and keys."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, norm_spec
from jaxpaged.models.qwen2 import windows
from jaxpaged.models.weight_rules import WeightRule, as_is

IGNORED = llama.IGNORED
WEIGHTS = (
    *llama.WEIGHTS,
    WeightRule("model.layers.{i}.self_attn.q_norm.weight", "layers.{i}.attn.q_norm.scale", as_is),
    WeightRule("model.layers.{i}.self_attn.k_norm.weight", "layers.{i}.attn.k_norm.scale", as_is),
)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3 checkpoint."""
    return common_config({"head_dim": 128} | hf, attention={"qk_norm": norm_spec(hf)}, mlp={"bias": False},
                         windows=windows(hf))
