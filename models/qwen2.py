"""The Qwen2 family, Qwen2.5 included: Llama with biases on queries, keys and values alone."""

from typing import Any

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config

IGNORED = llama.IGNORED
WEIGHTS = llama.WEIGHTS


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen2 checkpoint.

    Raises:
        UnsupportedModelError: some layers see a sliding window only.
    """
    if hf.get("use_sliding_window"):
        raise UnsupportedModelError("config.json: use_sliding_window is not supported; set it to false with "
                                    "--hf-overrides to let every layer see the whole context")
    return common_config(hf, attention_bias=True, attention_output_bias=False, mlp_bias=False)
