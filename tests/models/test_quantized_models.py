"""Models with quantized weights: logits of transformers in float32, which runs with the dequantized ones."""

from pathlib import Path

import numpy as np
import pytest

from tests.models.test_models import prefill_logits, reference_logits
from tests.support.quantized_checkpoints import KINDS, write_both
from tests.support.tiny_llama import CONFIG, random_prompt, random_weights


@pytest.mark.parametrize("name", ["gptq in order", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(
    KINDS.keys() - {"gptq in order"}))])
def test_logits(name: str, tmp_path: Path) -> None:
    quantized, plain = write_both(tmp_path, KINDS[name], CONFIG, random_weights())
    tokens = random_prompt(100, 1)
    wanted = reference_logits(plain, tokens)
    assert wanted.std() > 0.5, "logits that differ too little to mean anything"
    np.testing.assert_allclose(prefill_logits(quantized, tokens), wanted, atol=5e-5 * wanted.std(), rtol=1e-4)
