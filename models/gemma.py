"""The first Gemma family: Llama with scaled embeddings, norms of 1 + scale, a tied head and GELU."""

from typing import Any

from jaxpaged.core.errors import UnsupportedModelError
from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import activation, common_config, norm_spec, size, with_defaults

DEFAULTS: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "vocab_size": 256000, "hidden_size": 3072,
    "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "eos_token_id": 1, "tie_word_embeddings": True, "rope_theta": 10000.0, "attention_bias": False,
}
IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Gemma checkpoint; all say gelu in one way or another, and mean its approximation by tanh."""
    hf = with_defaults(hf, DEFAULTS)
    kind = activation(hf, "hidden_act")
    if activation({"hidden_activation": hf["hidden_act"]} | hf, "hidden_activation") != kind and kind != "gelu":
        raise UnsupportedModelError("config.json: hidden_act and hidden_activation contradict each other; set "
                                    "hidden_activation to null by --hf-overrides")
    return common_config(hf, mlp={"bias": False, "activation": "gelu_tanh" if kind == "gelu" else kind},
                         reads=("hidden_activation",), **gemma_norms(hf))


def gemma_norms(hf: dict[str, Any]) -> dict[str, Any]:
    """What all generations of Gemma share: the norm, and the factor on embeddings."""
    return {"norm": norm_spec(hf, plus_one=True), "embedding_scale": size(hf, "hidden_size") ** 0.5}
