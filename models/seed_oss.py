"""The Seed-OSS family: Llama with biases on queries, keys and values, and a flag of its own for the output's."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, with_defaults

DEFAULTS: dict[str, Any] = llama.DEFAULTS | {
    "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "vocab_size": 155136,
    "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8,
    "max_position_embeddings": 524288, "attention_bias": True, "attention_out_bias": False, "head_dim": 128,
}
IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Seed-OSS checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    return common_config(hf, attention={"output_bias": flag(hf, "attention_out_bias")})
