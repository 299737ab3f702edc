"""Families whose code is in their checkpoints alone: logits of tiny ones equal those of a twin.

The twin is a model of transformers that computes the same; the checkpoint has its weights in the layout of the family.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.core.errors import CheckpointError
from jaxpaged.models.config import AttentionSpec, ModelConfig
from jaxpaged.models.registry import find_family
from tests.models.test_models import check_steps
from tests.support.sameness import compare_ids, num_decided
from tests.support.sharded_process import run_cases
from tests.support.tiny_llama import ENGINE_ARGS, random_prompt, write_model

Tensors = dict[str, np.ndarray]
D, HEADS, KV_HEADS, HEAD, F, V = 64, 4, 2, 16, 96, 257
SIZES = {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 2, "eos_token_id": 256,
         "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128,
         "rms_norm_eps": 1e-5}
GLM = {"num_layers": 2, "padded_vocab_size": V, "hidden_size": D, "ffn_hidden_size": F, "kv_channels": HEAD,
       "num_attention_heads": HEADS, "seq_length": 128, "layernorm_epsilon": 1e-5, "eos_token_id": 256}
BAICHUAN = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads",)}


def parts_of(weights: Tensors, layer: int, kind: str = "weight") -> list[np.ndarray]:
    """Queries, keys and values, each [heads, H, ...]."""
    found = [weights.pop(f"model.layers.{layer}.self_attn.{name}_proj.{kind}") for name in "qkv"]
    return [part.reshape(-1, HEAD, *part.shape[1:]) for part in found]


def renamed(weights: Tensors, **names: str) -> Tensors:
    """With other stems; dots are written as two underscores."""
    def of(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old.replace("__", "."), new)
        return name

    return {of(name): tensor for name, tensor in weights.items()}


def internlm2(weights: Tensors) -> Tensors:
    for layer in range(2):
        q, k, v = parts_of(weights, layer)
        groups = [np.concatenate([q[2 * group : 2 * group + 2], k[group : group + 1], v[group : group + 1]])
                  for group in range(KV_HEADS)]
        weights[f"model.layers.{layer}.attention.wqkv.weight"] = np.concatenate(groups).reshape(-1, D)
    return renamed(weights, self_attn__o_proj="attention.wo", mlp__gate_proj="feed_forward.w1",
                   mlp__up_proj="feed_forward.w3", mlp__down_proj="feed_forward.w2", input_layernorm="attention_norm",
                   post_attention_layernorm="ffn_norm", embed_tokens="tok_embeddings", lm_head="output")


def baichuan(weights: Tensors) -> Tensors:
    for layer in range(2):
        packed = np.concatenate(parts_of(weights, layer))
        weights[f"model.layers.{layer}.self_attn.W_pack.weight"] = packed.reshape(-1, packed.shape[-1])
    return weights


def chatglm(weights: Tensors) -> Tensors:
    for layer in range(2):
        for kind in ("weight", "bias"):
            packed = np.concatenate(parts_of(weights, layer, kind))
            weights[f"model.layers.{layer}.self_attention.query_key_value.{kind}"] = packed.reshape(
                -1, *packed.shape[2:])
    found = renamed(weights, self_attn__o_proj="self_attention.dense", mlp__gate_up_proj="mlp.dense_h_to_4h",
                    mlp__down_proj="mlp.dense_4h_to_h", model__layers="transformer.encoder.layers",
                    model__norm="transformer.encoder.final_layernorm", lm_head="transformer.output_layer",
                    model__embed_tokens="transformer.embedding.word_embeddings")
    return found | {"transformer.rotary_pos_emb.inv_freq": np.zeros(4, np.float32)}


@dataclass(frozen=True)
class Twin:
    """A checkpoint: its config.json, the twin's config, how its tensors are laid out.

    Attributes:
        alibi: the slopes of a twin that gets ALiBi as its mask, and no rotation, as all positions are 0.
        unit_head: rows of the twin's head are divided by their length.
    """

    config: dict[str, Any]
    twin: dict[str, Any]
    layout: Callable[[Tensors], Tensors] = field(default=lambda weights: weights)
    alibi: tuple[float, ...] = ()
    unit_head: bool = False


TWINS = {
    "internlm2": Twin(SIZES | {"architectures": ["InternLM2ForCausalLM"], "bias": False}, {}, internlm2),
    "internlm3": Twin(SIZES | {"model_type": "internlm3", "head_dim": None, "qkv_bias": True, "bias": True},
                      {"attention_bias": True, "mlp_bias": True}),
    "internlm3 of transformers": Twin(
        SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "internlm3", "head_dim": 16,
                 "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "minicpm": Twin(SIZES | {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16},
                    {"model_type": "granite", "tie_word_embeddings": True, "embedding_multiplier": 12.0,
                     "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 4.0, "attention_multiplier": 0.25}),
    # The factors of the released model, whose base is wider than this one.
    "minicpm 2b": Twin(SIZES | {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
                       {"model_type": "granite", "tie_word_embeddings": True, "embedding_multiplier": 12.0,
                        "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 0.25, "attention_multiplier": 0.25}),
    "baichuan 7b": Twin(BAICHUAN | {"architectures": ["BaiChuanForCausalLM"]}, {"num_key_value_heads": HEADS},
                        baichuan),
    # Six heads: two of the slopes lie between the others.
    "baichuan 13b": Twin({key: value for key, value in BAICHUAN.items() if key != "max_position_embeddings"} | {
        "architectures": ["BaichuanForCausalLM"], "model_max_length": 128, "hidden_size": 96,
        "num_attention_heads": 6}, {"num_key_value_heads": 6, "hidden_size": 96, "num_attention_heads": 6}, baichuan,
        alibi=tuple(2.0 ** -power for power in (2, 4, 6, 8, 1, 3))),
    "baichuan 2": Twin(BAICHUAN | {"model_type": "baichuan", "z_loss_weight": 0}, {"num_key_value_heads": HEADS},
                       baichuan, unit_head=True),
    "chatglm2": Twin(GLM | {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_qkv_bias": True,
                            "multi_query_attention": True, "multi_query_group_num": KV_HEADS},
                     {"model_type": "glm", "head_dim": HEAD, "pad_token_id": None}, chatglm),
    "chatglm3 32k": Twin(GLM | {"architectures": ["ChatGLMForConditionalGeneration"], "model_type": "chatglm",
                                "add_qkv_bias": True, "rope_ratio": 50},
                         {"model_type": "glm", "head_dim": HEAD, "pad_token_id": None, "num_key_value_heads": HEADS,
                          "rope_parameters": {"rope_type": "default", "rope_theta": 5e5,
                                              "partial_rotary_factor": 0.5}}, chatglm),
}


def write_twin(folder: Path, name: str) -> Any:
    """The checkpoint, and the twin as a model of torch."""
    torch = pytest.importorskip("torch", reason="torch is there on Python 3.11 only")
    from transformers import AutoConfig, AutoModelForCausalLM

    twin = TWINS[name]
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": "llama", **SIZES, **twin.twin}))
    for key, parameter in model.named_parameters():
        scale = 1.0 if "embed" in key else 0.2 if parameter.ndim == 1 else 2 * parameter.shape[1] ** -0.5
        if "lm_head" in key and twin.unit_head:
            scale = 3.0
        parameter.data = ("norm" in key) + scale * torch.randn_like(parameter)
    weights = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    if twin.unit_head:
        head = model.lm_head.weight
        head.data = head.data / head.data.norm(dim=1, keepdim=True)
    write_model(folder)
    save_file({key: np.ascontiguousarray(value) for key, value in twin.layout(weights).items()},
              folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(twin.config))
    return model.eval()


def twin_logits(name: str, model: Any, tokens: list[int]) -> np.ndarray:
    """[T, V]."""
    import torch

    more: dict[str, Any] = {}
    if slopes := TWINS[name].alibi:
        distance = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
        bias = -torch.tensor(slopes)[:, None, None] * distance
        more = {"attention_mask": torch.where(distance < 0, -torch.inf, bias)[None],
                "position_ids": torch.zeros(1, len(tokens), dtype=torch.int64)}
    with torch.inference_mode():
        return model(torch.tensor([tokens]), **more).logits[0].numpy()


@pytest.mark.parametrize("name", TWINS)
def test_logits(name: str, tmp_path: Path) -> None:
    """In one step, in pieces, token by token, and of two requests that share a prefix."""
    tokens = random_prompt(100, 1)
    model = write_twin(tmp_path / "model", name)
    check_steps(tmp_path / "model", tokens, twin_logits(name, model, tokens))


def test_greedy_ids_on_two_devices(tmp_path: Path) -> None:
    """Fused by groups of heads, one after the other, and with ALiBi: each device reads its own heads."""
    names = "internlm2", "baichuan 13b", "chatglm2"
    models = {name: write_twin(tmp_path / name, name) for name in names}
    prompt = random_prompt(40, 2)
    found = run_cases([{"size": 2, "engine": {"model": str(tmp_path / name), **ENGINE_ARGS},
                        "requests": [(prompt, {"temperature": 0}, 20)]} for name in names])
    for name, result in zip(names, found, strict=True):
        [ids] = result["ids"]
        best = np.sort(twin_logits(name, models[name], [*prompt, *ids[:-1]])[len(prompt) - 1 :], axis=1)
        wanted = twin_logits(name, models[name], [*prompt, *ids[:-1]])[len(prompt) - 1 :].argmax(axis=1).tolist()
        gaps = (best[:, -1] - best[:, -2]).tolist()
        assert compare_ids(ids, wanted, gaps) is None, name
        assert num_decided(gaps) > 10, "too many near-ties to mean anything"


@pytest.mark.parametrize(("name", "changes", "text"), [
    ("chatglm2", {"rmsnorm": False}, "rmsnorm False is not supported"),
    ("chatglm2", {"position_encoding_2d": True}, "position_encoding_2d True is not supported"),
    ("chatglm2", {"pre_seq_len": 128}, "pre_seq_len 128 is not supported"),
    ("chatglm2", {"original_rope": False}, "original_rope False is not supported"),
    ("chatglm2", {"kv_channels": "x"}, "kv_channels must be a positive integer"),
    ("minicpm", {"num_experts": 8}, "num_experts is 8"),
    ("minicpm", {"sparse_config": {"kernel_size": 32}}, "sparse_config is"),
    ("minicpm", {"scale_depth": "x"}, "scale_depth must be a positive number"),
    ("baichuan 13b", {"model_max_length": -1}, "model_max_length must be a positive integer"),
    ("internlm2", {"bias": "no"}, "bias must be true or false"),
])
def test_what_cannot_be_served_is_named(name: str, changes: dict[str, Any], text: str) -> None:
    hf = TWINS[name].config | changes
    with pytest.raises(CheckpointError, match=text):
        find_family(hf).config_from_hf(hf)


def test_which_baichuan_has_alibi() -> None:
    """13B, whose config.json says nothing of positions but model_max_length."""
    def read(**keys: Any) -> ModelConfig:
        hf = {"architectures": ["BaichuanForCausalLM"], **keys}
        return find_family(hf).config_from_hf(hf)

    seven = {"hidden_size": 4096, "max_position_embeddings": 4096, "model_max_length": 4096}
    thirteen = {"hidden_size": 5120, "num_attention_heads": 40, "model_max_length": 4096}
    def biases(config: ModelConfig) -> set[Any]:
        return {(isinstance(spec, AttentionSpec) and spec.alibi, spec.rope) for spec in config.attention}

    for keys in (seven, seven | {"max_position_embeddings": None}):
        assert not any(alibi for alibi, _ in biases(read(**keys)))
    for keys in (thirteen, thirteen | {"max_position_embeddings": 4096}):
        assert biases(read(**keys)) == {(True, None)}
        assert read(**keys).max_model_len == 4096
    assert not read(**seven).normalized_head
    assert read(**seven, vocab_size=125696).normalized_head
