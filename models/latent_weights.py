"""What the families with latent attention share: how config.json describes it, and where its weights are."""

import math
from typing import Any

import numpy as np

from jaxpaged.core.errors import CheckpointError
from jaxpaged.models import llama
from jaxpaged.models.config import LatentSpec, ModelConfig
from jaxpaged.models.hf_config import common_config, flag, size
from jaxpaged.models.rope_tables import rope_config
from jaxpaged.models.weight_rules import TensorSlice, WeightRule, as_is, dense, transposed, whole

# Keys of `config_checks.NEUTRAL` that these families read.
READS = ("kv_lora_rank", "q_lora_rank", "rope_interleave")
_ATTENTION = "model.layers.{i}.self_attn"
_PATH = "layers.{i}.attn"
_UP = f"{_ATTENTION}.kv_b_proj.weight"


def latent_spec(hf: dict[str, Any]) -> LatentSpec:
    """Latent attention as the keys of DeepSeek describe it. Long contexts have YaRN's factor on scores, too.

    Raises:
        CheckpointError: a key is missing, of the wrong type, or rotated numbers are not pairs.
    """
    rotary_dim, key_dim = size(hf, "qk_rope_head_dim"), size(hf, "qk_nope_head_dim")
    if rotary_dim % 2:
        raise CheckpointError(f"config.json: qk_rope_head_dim ({rotary_dim}) must be even")
    rope = rope_config(hf, head_dim=rotary_dim)
    assert rope is not None
    table = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    growth, factor = table.get("mscale_all_dim") or 0, dict(rope.scaling).get("factor", 1.0)
    sharpened = 1 + 0.1 * growth * math.log(factor) if rope.kind != "default" and factor > 1 else 1.0
    return LatentSpec(
        size(hf, "num_attention_heads"), size(hf, "kv_lora_rank"), rotary_dim, key_dim, size(hf, "v_head_dim"),
        None if hf.get("q_lora_rank") is None else size(hf, "q_lora_rank"),
        (key_dim + rotary_dim) ** -0.5 * sharpened**2, bias=flag(hf, "attention_bias"))


def latent_config(hf: dict[str, Any], *, neighbors: bool, **more: Any) -> ModelConfig:
    """ModelConfig with latent attention in all layers.

    Args:
        neighbors: pairs of rotated numbers are neighbors in the checkpoint.
        more: other arguments of `common_config`.
    """
    spec = latent_spec(hf)
    sizes = {"head_dim": spec.rotary_dim, "num_key_value_heads": spec.num_heads}
    return common_config(hf | sizes, latent=spec, rope={"neighbors": neighbors}, **more)


def _rows(spec: LatentSpec, rows: np.ndarray) -> np.ndarray:
    """Rows [..., n], of which the last O are rotated, as they lie here: the first numbers of pairs, then the second."""
    if spec.rope is None or not spec.rope.neighbors:
        return rows.reshape(-1)
    still, turned = rows[..., : -spec.rotary_dim], rows[..., -spec.rotary_dim :]
    return np.concatenate([still, turned[..., ::2], turned[..., 1::2]], axis=-1).reshape(-1)


def _query_rows(spec: LatentSpec) -> np.ndarray:
    each = spec.key_dim + spec.rotary_dim
    return _rows(spec, np.arange(spec.num_heads * each).reshape(-1, each))


def _latent_rows(spec: LatentSpec) -> np.ndarray:
    return _rows(spec, np.arange(spec.head_dim))


def _matrices(spec: LatentSpec) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all heads' key matrices, and those of their value matrices, which follow each other in each head."""
    each = spec.key_dim + spec.value_dim
    rows = np.arange(spec.num_heads * each).reshape(-1, each)
    return rows[:, : spec.key_dim].reshape(-1), rows[:, spec.key_dim :].reshape(-1)


def _latents(name: str) -> TensorSlice:
    return TensorSlice(f"{_ATTENTION}.kv_a_proj_with_mqa.{name}", whole, rows=_latent_rows)


WEIGHTS = (
    *(rule for rule in llama.WEIGHTS if ".attn." not in rule.path),
    WeightRule(TensorSlice(f"{_ATTENTION}.q_b_proj.weight", whole, rows=_query_rows,
                           other=f"{_ATTENTION}.q_proj.weight"), f"{_PATH}.q.kernel", transposed, (None, "heads")),
    *dense(f"{_ATTENTION}.q_a_proj", f"{_PATH}.q_down", transposed, ()),
    WeightRule(f"{_ATTENTION}.q_a_layernorm.weight", f"{_PATH}.q_norm.scale", as_is),
    WeightRule(_latents("weight"), f"{_PATH}.kv_down.kernel", transposed),
    WeightRule(_latents("bias"), f"{_PATH}.kv_down.bias", as_is),
    WeightRule(f"{_ATTENTION}.kv_a_layernorm.weight", f"{_PATH}.kv_norm.scale", as_is),
    WeightRule(TensorSlice(_UP, whole, rows=lambda spec: _matrices(spec)[0]), f"{_PATH}.key_up", as_is, ("heads",)),
    WeightRule(TensorSlice(_UP, whole, rows=lambda spec: _matrices(spec)[1]), f"{_PATH}.value_up", as_is, ("heads",)),
    *dense(f"{_ATTENTION}.o_proj", f"{_PATH}.o", transposed, ("heads", None), whole_bias=True))
