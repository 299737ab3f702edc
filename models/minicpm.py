"""The MiniCPM family: Llama with factors on embeddings, residuals and logits."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, number, size, with_defaults

# What an absent key means, as in the config class of the checkpoints' own code.
DEFAULTS: dict[str, Any] = {key: value for key, value in llama.DEFAULTS.items() if key not in ("head_dim",
                                                                                              "mlp_bias")} | {
    "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "tie_word_embeddings": True, "scale_emb": 1,
    "scale_depth": 1, "dim_model_base": 1,
}
READS = ("scale_emb", "scale_depth", "dim_model_base", "partial_rotary_factor")
IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a MiniCPM checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    embedding, depth, base = (number(hf, name, 1.0) for name in READS[:3])
    return common_config(hf, layer={"residual_scale": depth * size(hf, "num_hidden_layers") ** -0.5}, reads=READS,
                         embedding_scale=embedding, logit_scale=base / size(hf, "hidden_size"))
