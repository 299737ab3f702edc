"""The engine with checkpoints whose weights are quantized."""

from pathlib import Path

import pytest

from jaxpaged import LLM
from jaxpaged.errors import ConfigError
from tests.support.quantized_checkpoints import KINDS, write_both
from tests.support.tiny_llama import CONFIG, ENGINE_ARGS, random_weights


def test_a_method_that_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    quantized, plain = write_both(tmp_path, KINDS["awq"], CONFIG, random_weights())
    with pytest.raises(ConfigError, match=r"--quantization gptq, but .* are quantized by awq; leave the flag out"):
        LLM(str(quantized), quantization="gptq", **ENGINE_ARGS)
    with pytest.raises(ConfigError, match=r"--quantization awq_marlin, but .* are plain; leave the flag out"):
        LLM(str(plain), quantization="awq_marlin", **ENGINE_ARGS)
    with pytest.raises(ConfigError, match=r"quantization must be one of none, awq"):
        LLM(str(plain), quantization="squeezellm", **ENGINE_ARGS)
