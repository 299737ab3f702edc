"""The Baichuan family: Llama with fused queries, keys and values; 13B has ALiBi, and Baichuan 2 a head of unit rows."""

from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import MULTI_HEAD, common_config, size, with_defaults
from jaxpaged.models.weight_rules import WeightRule, fused_qkv, transposed, unit_rows, with_rules

# What an absent key means, as in the config class of the checkpoints' own code.
DEFAULTS: dict[str, Any] = {
    "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "vocab_size": 64000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "eos_token_id": 2, "tie_word_embeddings": False, "rope_theta": 10000.0,
}
_VOCAB_OF_2 = 125696
_WIDTHS = {4096: False, 5120: True}  # of the released sizes, and whether these have ALiBi
IGNORED = llama.IGNORED
WEIGHTS = with_rules(
    llama.WEIGHTS,
    WeightRule(fused_qkv("model.layers.{i}.self_attn.W_pack.weight"), "layers.{i}.attn.qkv.kernel", transposed,
               (None, ("heads", "kv_heads", "kv_heads"))),
    WeightRule("lm_head.weight", "head.kernel", transposed, (None, "vocab"),
               lambda config: unit_rows if config.normalized_head else transposed))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Baichuan checkpoint; with ALiBi it has model_max_length, but no max_position_embeddings."""
    hf = with_defaults(hf, DEFAULTS) | MULTI_HEAD
    found = hf.get("max_position_embeddings")
    alibi = _WIDTHS.get(hf["hidden_size"] if isinstance(hf["hidden_size"], int) else 0, found is None)
    hf["max_position_embeddings"] = size(hf, "max_position_embeddings" if found else "model_max_length", 4096)
    return common_config(
        hf, attention={"bias": False, "output_bias": False, "alibi": alibi}, mlp={"bias": False}, rotated=not alibi,
        normalized_head=size(hf, "vocab_size") == _VOCAB_OF_2 or "z_loss_weight" in hf)
