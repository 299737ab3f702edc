"""The GLM-4-0414 family (Glm4ForCausalLM): GLM-4 with norms before and after each block."""

from typing import Any

from jaxpaged.models import glm, llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.glm import glm_config
from jaxpaged.models.hf_config import with_defaults
from jaxpaged.models.weight_rules import norms, with_rules

DEFAULTS: dict[str, Any] = glm.DEFAULTS | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
IGNORED = llama.IGNORED
WEIGHTS = with_rules(glm.WEIGHTS, *norms(attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a GLM-4-0414 checkpoint."""
    return glm_config(with_defaults(hf, DEFAULTS), norms="both")
