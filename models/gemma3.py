"""The Gemma 3 family: Gemma 2 with norms of queries and keys, and a rotary rule for each type of layer."""

from typing import Any

from jaxpaged.models import gemma2, llama, qwen3
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.gemma2 import gemma2_config
from jaxpaged.models.hf_config import all_but_every, layer_types, norm_spec, number, pattern_length, with_defaults
from jaxpaged.models.rope_tables import by_layer_type
from jaxpaged.models.weight_rules import with_rules

DEFAULTS: dict[str, Any] = gemma2.DEFAULTS | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208,
    "max_position_embeddings": 131072, "rope_theta": 1e6, "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
IGNORED = llama.IGNORED
WEIGHTS = with_rules(gemma2.WEIGHTS, *qwen3.HEAD_NORMS)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Gemma 3 checkpoint; of a multimodal one, its text model's."""
    hf = with_defaults(hf, DEFAULTS)
    hf |= {"layer_types": layer_types(hf, all_but_every(pattern_length(hf, 6)))}
    hf = by_layer_type(hf, number(hf, "rope_local_base_freq", 10000.0))
    return gemma2_config(hf, (*gemma2.READS, "rope_local_base_freq"), qk_norm=norm_spec(hf, plus_one=True))
