"""The Granite 3 family: Llama with factors on embeddings, scores, residuals and logits."""

from collections.abc import Sequence
from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, number, with_defaults

DEFAULTS: dict[str, Any] = {key: value for key, value in llama.DEFAULTS.items() if key != "head_dim"} | {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "embedding_multiplier": 1.0,
    "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}
IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Granite checkpoint."""
    return granite_config(with_defaults(hf, DEFAULTS))


def granite_config(hf: dict[str, Any], reads: Sequence[str] = (), **more: Any) -> ModelConfig:
    """With other arguments of `common_config`."""
    names = "attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling"
    scores, residual, embedding, logits = (number(hf, name, 1.0) for name in names)
    return common_config(hf, attention={"scale": scores}, layer={"residual_scale": residual}, reads=(*names, *reads),
                         embedding_scale=embedding, logit_scale=1 / logits, **more)
