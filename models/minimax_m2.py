"""The MiniMax-M2 family: Mixtral with norms over all heads' queries, and keys, together, and heads partly rotated."""

from typing import Any

from jaxpaged.core.errors import CheckpointError
from jaxpaged.models import llama, mixtral, olmo2
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.hf_config import common_config, flag, norm_spec, size, with_defaults
from jaxpaged.models.mixture_config import COUNTS, experts_spec
from jaxpaged.models.weight_rules import choice_bias

DEFAULTS: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072,
    "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 196608, "rms_norm_eps": 1e-6,
    "eos_token_id": 200020, "tie_word_embeddings": False, "rope_theta": 5e6, "num_experts_per_tok": 8,
    "num_local_experts": 256,
}
IGNORED = (*llama.IGNORED, "model.mtp.*")
WEIGHTS = (*mixtral.WEIGHTS, *olmo2.HEAD_NORMS,
           choice_bias("model.layers.{i}.block_sparse_moe.e_score_correction_bias"))


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a MiniMax-M2 checkpoint.

    Raises:
        CheckpointError: more numbers of a head are rotated than it has.
    """
    hf = with_defaults(hf, DEFAULTS)
    if hf.get("rotary_dim") is not None:
        rotated, head_dim = size(hf, "rotary_dim"), size(hf, "head_dim")
        if rotated > head_dim:
            raise CheckpointError(f"config.json: rotary_dim ({rotated}) must be at most head_dim ({head_dim})")
        hf = {"partial_rotary_factor": rotated / head_dim} | hf
    normed = hf.get("use_qk_norm") is None or flag(hf, "use_qk_norm")
    spec = experts_spec(hf, "intermediate_size", default_count="num_local_experts", normalized=True,
                        rule={"sigmoid": True}, choice_bias=hf.get("use_routing_bias") is None or flag(
                            hf, "use_routing_bias"))
    return common_config(hf, attention={"qk_norm": norm_spec(hf) if normed else None, "qk_norm_over": "all heads"},
                         reads=("partial_rotary_factor", "use_qk_norm", *COUNTS), experts=lambda layer: spec)
