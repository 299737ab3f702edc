"""The Ministral 3 family: Mistral with YaRN, and queries that grow with their position beyond the first context."""

from typing import Any

from jaxpaged.core.errors import CheckpointError
from jaxpaged.models import mistral
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import number, with_defaults

DEFAULTS: dict[str, Any] = mistral.DEFAULTS | {
    "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "vocab_size": 131072,
    "num_hidden_layers": 34, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "sliding_window": None,
}
_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
         "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}
IGNORED = mistral.IGNORED
WEIGHTS = mistral.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Ministral 3 checkpoint."""
    hf = with_defaults(hf, DEFAULTS)
    table = hf.get("rope_scaling") or hf.get("rope_parameters") or _ROPE
    if not isinstance(table, dict):
        raise CheckpointError("config.json: rope_scaling and rope_parameters must be objects")
    growth = None
    if beta := table.get("llama_4_scaling_beta", hf.get("llama_4_scaling_beta")):  # GGUF has no tables
        growth = tuple(number(table | {"llama_4_scaling_beta": beta}, key, 0.0)
                       for key in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    apart = "llama_4_scaling_beta", "max_position_embeddings"
    plain = {key: value for key, value in table.items() if key not in apart}
    return mistral.mistral_config(hf | {"rope_scaling": plain, "rope_parameters": None}, query_growth=growth)
