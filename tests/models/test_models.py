"""Logits and greedy ids of small random checkpoints equal those of transformers in float32."""

import functools
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig

from jaxpaged import LLM, SamplingParams
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import CheckpointError, ConfigError
from jaxpaged.engine.startup import model_of
from jaxpaged.models.config import AttentionSpec, MLPSpec, RopeConfig
from jaxpaged.models.hf_config import common_config
from jaxpaged.models.rotary import rotary_angles, rotate
from tests.support.paged_model import PagedModel, load
from tests.support.sameness import compare_ids, num_decided
from tests.support.tiny_llama import CONFIG, ENGINE_ARGS, Reference, random_prompt, random_weights, write_model

COMMON = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 256,
          "pad_token_id": None, "rms_norm_eps": 1e-5}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
WINDOW_FIRST = ["sliding_attention", "full_attention"]
# One number for each of the 12 pairs that phi4-mini's heads rotate.
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1 + index / 16 for index in range(12)],
            "long_factor": [2.0 + index for index in range(12)], "original_max_position_embeddings": 64}
LATENTS = {"kv_lora_rank": 32, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
           "num_key_value_heads": 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "dynamic rope": {"rope_parameters": DYNAMIC, "max_position_embeddings": 64},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "wide heads": {"head_dim": 32, "num_key_value_heads": 4, "rope_parameters": {"rope_type": "default",
                                                                                  "rope_theta": 1e6}},
    "odd sizes": {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10,
                  "rms_norm_eps": 1e-2},
    "all at once": {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True,
                    "num_key_value_heads": 1, "rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn in full": {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "mscale": 1.0, "truncate": False,
                                                "mscale_all_dim": 0.5}},
    "yarn with a given factor": {"rope_parameters": YARN | {"attention_factor": 1.5}},
    "qwen2": {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2 windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "rope_parameters": YARN},
    "mistral": {"model_type": "mistral", "sliding_window": 21, "head_dim": 24},
    "mistral without a window": {"model_type": "mistral", "sliding_window": None},
    "yarn added later": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "mistral within its window": {"model_type": "mistral", "sliding_window": 128},
    "gemma": {"model_type": "gemma", "head_dim": 24, "hidden_act": "gelu"},
    "gemma2": {"model_type": "gemma2", "head_dim": 24, "sliding_window": 21, "query_pre_attn_scalar": 10,
               "attn_logit_softcapping": 4.0, "final_logit_softcapping": 30.0},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 24, "sliding_window": 21, "query_pre_attn_scalar": 10,
               "layer_types": WINDOW_FIRST, "rope_parameters": {
                   "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                   "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
    "phi3": {"model_type": "phi3", "sliding_window": 40},
    "phi4-mini": {"model_type": "phi3", "num_attention_heads": 2, "tie_word_embeddings": True,
                  "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75,
                  "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75}},
    "glm": {"model_type": "glm", "head_dim": 24},
    "glm4": {"model_type": "glm4", "head_dim": 24},
    "granite": {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 0.7,
                "residual_multiplier": 0.4, "attention_multiplier": 0.1, "tie_word_embeddings": True},
    "cohere": {"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.2},
    "cohere2": {"model_type": "cohere2", "layer_types": WINDOW_FIRST, "sliding_window": 21, "logit_scale": 0.2},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "layer_types": WINDOW_FIRST, "sliding_window": 21, "rope_parameters": {
        "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "exaone4": {"model_type": "exaone4", "layer_types": WINDOW_FIRST, "sliding_window": 21},
    "seed-oss": {"model_type": "seed_oss", "head_dim": 24},
    "ministral": {"model_type": "ministral", "head_dim": 24, "layer_types": WINDOW_FIRST, "sliding_window": 21},
    # As GGUF files mean it: their patterns of layers, and scales of scores, are not in the file.
    "gemma2 as converted": {"model_type": "gemma2", "head_dim": 24, "sliding_window": 21, "query_pre_attn_scalar": 24,
                            "attn_logit_softcapping": 4.0, "final_logit_softcapping": 30.0},
    "gemma3 as converted": {"model_type": "gemma3_text", "head_dim": 24, "sliding_window": 21,
                            "query_pre_attn_scalar": 24, "num_hidden_layers": 6, "rope_parameters": {
                                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "cohere2 as converted": {"model_type": "cohere2", "sliding_window": 21, "num_hidden_layers": 4, "logit_scale": 0.2},
    "smollm3 as converted": {"model_type": "smollm3", "num_hidden_layers": 4},
    "exaone4 as converted": {"model_type": "exaone4", "sliding_window": 21, "num_hidden_layers": 4},
    "ministral3": {"model_type": "ministral3", "head_dim": 24, "rope_parameters": YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 21},
    "gpt2": {"model_type": "gpt2"},
    "gpt2, scores by layer": {"model_type": "gpt2", "n_inner": 80, "scale_attn_by_inverse_layer_idx": True},
    "pythia": {"model_type": "gpt_neox", "hidden_act": "gelu"},
    "gpt-neox in sequence": {"model_type": "gpt_neox", "use_parallel_residual": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    "falcon 7b": {"model_type": "falcon"},
    "falcon 40b": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "falcon 11b": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2,
                   "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False},
    "falcon rw": {"model_type": "falcon", "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
                  "hidden_size": 60, "num_attention_heads": 6},
    "opt": {"model_type": "opt", "ffn_dim": 96},
    "mixtral": {"model_type": "mixtral", "head_dim": 24, "sliding_window": 21, "num_local_experts": 5,
                "num_experts_per_tok": 2},
    "qwen2-moe": {"model_type": "qwen2_moe", "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 3,
                  "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72, "use_sliding_window": True,
                  "sliding_window": 21, "max_window_layers": 2, "mlp_only_layers": [1]},
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 24, "num_experts": 16, "num_experts_per_tok": 4,
                  "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 2},
    "qwen3-moe, all experts": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 4,
                               "moe_intermediate_size": 24},
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "deepseek-v3": {"model_type": "deepseek_v3", "num_hidden_layers": 3, "n_routed_experts": 8, "n_group": 4,
                    "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24, **LATENTS,
                    "first_k_dense_replace": 1, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    "deepseek-v2": {"model_type": "deepseek_v2", "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
                    "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0,
                    "moe_intermediate_size": 24, **LATENTS, "q_lora_rank": None, "first_k_dense_replace": 1},
    "glm4-moe-lite": {"model_type": "glm4_moe_lite", "n_routed_experts": 8, "num_experts_per_tok": 3,
                      "moe_intermediate_size": 24, **LATENTS, "attention_bias": True, "rope_interleave": False},
    "gpt-oss": {"model_type": "gpt_oss", "head_dim": 24, "sliding_window": 21, "num_local_experts": 6,
                "num_experts_per_tok": 3, "swiglu_limit": 1.5, "rope_parameters": YARN | {"truncate": False}},
    "glm4-moe": {"model_type": "glm4_moe", "head_dim": 24, "num_hidden_layers": 3, "use_qk_norm": True,
                 "attention_bias": True, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
                 "moe_intermediate_size": 24, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    "granite-moe": {"model_type": "granitemoe", "embedding_multiplier": 3.0, "logits_scaling": 0.7,
                    "residual_multiplier": 0.4, "attention_multiplier": 0.1, "num_local_experts": 6,
                    "num_experts_per_tok": 3},
    # Its class in transformers turns long texts as if they were short.
    "phimoe": {"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True, "num_local_experts": 6,
               "router_jitter_noise": 0.2, "original_max_position_embeddings": 128, "rope_parameters": LONGROPE | {
                   "short_factor": [1 + index / 8 for index in range(8)], "long_factor": [2.0] * 8,
                   "original_max_position_embeddings": 128, "short_mscale": 1.2, "long_mscale": 1.2}},
    "minimax-m2": {"model_type": "minimax_m2", "head_dim": 24, "rotary_dim": 12, "num_local_experts": 8,
                   "num_experts_per_tok": 3},
    "ernie4.5-moe": {"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24,
                     "num_hidden_layers": 3},
    # A larger eps: where a query and the keys so far are at right angles the norm after it would divide by nearly 0.
    "qwen3-next 80b": {"model_type": "qwen3_next", "head_dim": 16, "num_hidden_layers": 4, "num_experts": 8,
                       "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
                       "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
                       "linear_value_head_dim": 10, "mlp_only_layers": [1], "rms_norm_eps": 3e-2},
    "opt 350m": {"model_type": "opt", "ffn_dim": 96, "do_layer_norm_before": False, "word_embed_proj_dim": 40},
}

# Written into config.json afterwards, as people do by hand.
EDITS = {"yarn added later": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}}


Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The directory of a checkpoint, written once."""
    return functools.cache(lambda name: write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", name))


def write_checkpoint(folder: Path, name: str) -> Path:
    """One of `CHECKPOINTS` with random weights, as transformers saves it, with a tokenizer beside it."""
    torch = pytest.importorskip("torch", reason="torch is there on Python 3.11 only")
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model(folder)
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        **({"model_type": "llama"} | COMMON | CHECKPOINTS[name])))
    for key, parameter in model.named_parameters():
        scale = 1.0 if "embed" in key else 0.2 if parameter.ndim == 1 else 2 * parameter.shape[1] ** -0.5
        parameter.data = ("norm" in key or "ln_" in key) + scale * torch.randn_like(parameter)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.rand_like(buffer))
    model.save_pretrained(folder)
    if name in EDITS:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | EDITS[name]))
    return folder


def prefill_logits(folder: Path, tokens: Sequence[int], dtype: Any = jnp.float32) -> np.ndarray:
    """[T, V]: one step over all tokens."""
    [logits] = PagedModel(folder, rows=len(tokens), dtype=dtype).step((0, 0, tokens))
    return logits


# Variants of other rows: they are for the slow tests.
VARIANTS = {
    "tied", "biases", "wide heads", "yarn in full", "yarn with a given factor", "yarn added later", "qwen2",
    "mistral without a window", "mistral within its window", "gemma2 as converted", "gemma3 as converted",
    "cohere2 as converted", "smollm3 as converted", "exaone4 as converted", "gpt2, scores by layer",
    "gpt-neox in sequence", "falcon 7b", "falcon 11b", "opt",
    "qwen3-moe, all experts", "granite-moe", "ernie4.5-moe", "minimax-m2", "phimoe",
    "glm4-moe", "deepseek-v2", "glm4-moe-lite"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIANTS)) for name in sorted(
    CHECKPOINTS.keys() - {"dynamic rope"})])  # which scales by length: see below
def test_logits(checkpoint: Checkpoints, name: str) -> None:
    """In one step, in pieces, token by token, and of two requests that share a prefix."""
    tokens = random_prompt(100, 1)
    check_steps(checkpoint(name), tokens, reference_logits(checkpoint(name), tokens))


def check_steps(folder: Path, tokens: Sequence[int], wanted: np.ndarray) -> None:
    """The logits of 100 tokens, computed in several ways."""
    assert wanted.std() > 0.5, "logits that differ too little to mean anything"
    check = partial(np.testing.assert_allclose, atol=5e-5 * wanted.std(), rtol=1e-4)
    model = PagedModel(folder, rows=len(tokens))
    borders = [0, 1, 20, 21, 22, 41, 60, *range(62, 69), 97, 100]  # around windows, blocks and original contexts
    pieces = [model.step((0, start, tokens[start:stop]))[0] for start, stop in pairwise(borders)]
    check(np.concatenate(pieces), wanted)
    if model.has_states:  # a request begins with the state after the prefix that it shares, not one further on
        check(np.concatenate([model.step((0, 0, tokens[:48]))[0], model.step((0, 48, tokens[48:]))[0]]), wanted)
        model.step((0, 0, tokens[:48]))
        model.share(3)
        check(np.concatenate(model.step((1, 48, tokens[48:70]), (0, 48, tokens[48:90]))),
              wanted[[*range(48, 70), *range(48, 90)]])
        check(np.stack([model.step((1, at, tokens[at : at + 1]))[0][0] for at in range(70, 76)]), wanted[70:76])
        check(model.step((1, 0, tokens))[0], wanted)
        return
    model.share(3)
    forked = model.step((1, 48, tokens[48:70]), (0, 99, tokens[99:]))
    check(np.concatenate(forked), wanted[[*range(48, 70), 99]])
    check(model.step((1, 0, tokens))[0], wanted)


def reference_logits(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    """[T, V], by transformers."""
    import torch

    from tests.support.reference_model import ReferenceModel

    with torch.inference_mode():
        return ReferenceModel(folder).model(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("longest", [pytest.param(64, marks=pytest.mark.slow), 65])
def test_longrope_is_that_of_the_longest_text_that_is_served(checkpoint: Checkpoints, longest: int) -> None:
    """Up to the original context, 64 tokens, it is the short one; transformers decides by the text in hand."""
    tokens = random_prompt(longest, 1)
    [found] = PagedModel(checkpoint("phi4-mini"), rows=longest, max_model_len=longest).step((0, 0, tokens))
    wanted = reference_logits(checkpoint("phi4-mini"), tokens)
    np.testing.assert_allclose(found, wanted, atol=5e-5 * wanted.std(), rtol=1e-4)
    [other] = PagedModel(checkpoint("phi4-mini"), rows=longest, max_model_len=129 - longest).step((0, 0, tokens))
    assert np.abs(other - wanted).max() > 0.1 * wanted.std()


@pytest.mark.parametrize("longest", [65, *(pytest.param(size, marks=pytest.mark.slow) for size in (64, 100, 128))])
def test_dynamic_scaling_is_that_of_the_longest_text_that_is_served(checkpoint: Checkpoints, longest: int) -> None:
    """Up to the model's own context, 64 tokens, there is none; transformers decides by the text in hand."""
    tokens = random_prompt(longest, 1)
    [found] = PagedModel(checkpoint("dynamic rope"), rows=longest, max_model_len=longest).step((0, 0, tokens))
    assert load(checkpoint("dynamic rope"))[2].max_stretched_len == 128
    wanted = reference_logits(checkpoint("dynamic rope"), tokens)
    np.testing.assert_allclose(found, wanted, atol=5e-5 * wanted.std(), rtol=1e-4)


@pytest.mark.parametrize(("name", "engine_args"), [
    ("all at once", {"max_num_batched_tokens": 7}), ("mistral", {"max_num_batched_tokens": 7}), ("qwen2 windows", {}),
    ("gemma2", {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("grouped", {}), ("mistral", {"max_num_batched_tokens": 7, "cpu_attention": "xla"}),
        ("qwen2 windows", {"cpu_attention": "xla"}), ("qwen3", {"max_num_batched_tokens": 7}),
        ("opt 350m", {"max_num_batched_tokens": 7}), ("falcon rw", {})))])
def test_greedy_ids(checkpoint: Checkpoints, name: str, engine_args: dict[str, Any]) -> None:
    """Through the whole engine: prompts in chunks, several at once, mixed with decoding."""
    from tests.support.reference_model import ReferenceModel

    model = ReferenceModel(checkpoint(name))
    prompts = [random_prompt(length, length) for length in (1, 15, 16, 17, 40, 90)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(model=str(checkpoint(name)), **ENGINE_ARGS | engine_args) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    decided = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output.outputs[0].token_ids
        assert len(ids) == 24
        reference = model.check(prompt, ids)
        assert compare_ids(ids, reference.ids, reference.gaps) is None
        decided += num_decided(reference.gaps)
    assert decided > 100, "too many near-ties to mean anything"


@pytest.mark.parametrize("name", ["gpt2", "opt", "pythia", "falcon 7b"])
def test_the_bare_decoder_has_the_names_of_the_whole_model(checkpoint: Checkpoints, name: str, tmp_path: Path) -> None:
    """As transformers saves it: without the prefix, which is another one for each family, and without a head."""
    folder = checkpoint(name)
    from transformers import AutoModel

    AutoModel.from_pretrained(folder).save_pretrained(tmp_path)
    assert not any(key.startswith(("transformer.", "model.", "gpt_neox.")) for key in load_file(
        tmp_path / "model.safetensors"))
    bare, whole = load(tmp_path)[1], load(folder)[1]
    head = whole.pop("head", None)
    assert (head is not None) == (name == "pythia") and "head" not in bare
    jax.tree.map(np.testing.assert_array_equal, bare, whole)


def test_learned_positions_bound_the_context(checkpoint: Checkpoints) -> None:
    """The last row of the table is used, and there are no positions beyond."""
    from tests.support.reference_model import ReferenceModel

    folder, prompt = checkpoint("opt"), random_prompt(120, 5)
    with pytest.raises(ConfigError, match=r"--max-model-len 129 .* of 128; lower it: the checkpoint has a learned"):
        LLM(model=str(folder), **ENGINE_ARGS | {"max_model_len": 129})
    with pytest.raises(CheckpointError, match=r"embed_positions.weight has shape \[130, 64\], which does not fit"):
        LLM(model=str(folder), **ENGINE_ARGS | {"hf_overrides": {"max_position_embeddings": 256}})
    with LLM(model=str(folder), **ENGINE_ARGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        [found] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    ids = found.outputs[0].token_ids
    assert len(ids) == 8 and found.outputs[0].finish_reason == "length"
    reference = ReferenceModel(folder).check(prompt, ids)
    assert compare_ids(ids, reference.ids, reference.gaps) is None


def test_numpy_reference(tmp_path: Path) -> None:
    """The reference of the engine's own tests agrees with transformers."""
    torch = pytest.importorskip("torch", reason="torch is there on Python 3.11 only")
    from tests.support.reference_model import ReferenceModel

    tokens = random_prompt(60, 2)
    model = ReferenceModel(write_model(tmp_path / "model")).model
    with torch.inference_mode():
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(Reference(CONFIG, random_weights()).logits(tokens), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_half_precision_models_are_not_rounded(tmp_path: Path, tied: bool) -> None:
    """bfloat16 has 8 bits: rounded to it, most of 257 candidates would tie with a neighbor."""
    folder = write_model(tmp_path / "model", {**CONFIG, "tie_word_embeddings": tied})
    logits = prefill_logits(folder, random_prompt(20, 3), jnp.bfloat16)
    rounded = logits.astype(jnp.bfloat16).astype(np.float32)
    assert (logits != rounded).mean() > 0.9
    config = CONFIG | {"tie_word_embeddings": tied}
    full = Reference(config, random_weights(config)).logits(random_prompt(20, 3))
    assert np.abs(logits - full).max() < 0.1 * full.std() + 0.1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_sums_of_half_precision_models_do_not_overflow(tmp_path: Path, dtype: Any) -> None:
    """Squares of states, and scores, that exceed float16: norms, softmax and logits are in float32."""
    weights = random_weights()
    weights["model.embed_tokens.weight"] *= 1000
    for name in weights:
        if "q_proj" in name or "k_proj" in name:
            weights[name] *= 30
    weights = {name: np.asarray(jnp.asarray(tensor, dtype), np.float32) for name, tensor in weights.items()}
    folder = write_model(tmp_path / "model")
    save_file(weights, folder / "model.safetensors")
    tokens = random_prompt(40, 4)
    assert (weights["model.embed_tokens.weight"][tokens] ** 2).sum(axis=1).min() > 65504
    logits, wanted = prefill_logits(folder, tokens, dtype), Reference(CONFIG, weights).logits(tokens)
    assert np.abs(logits - wanted).max() < (0.01 if dtype == jnp.float16 else 0.1) * wanted.std()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("position", [2049, 8191, 131_071])  # beyond what half precision counts to
def test_rotary_angles_of_far_positions(dtype: Any, position: int) -> None:
    """They are those of float32 from the integer position: cast at the end, they are as good at any position."""
    x = np.random.default_rng(0).standard_normal((1, 2, 64)).astype(np.float32)
    cos, sin = rotary_angles(jnp.array([position]), 64, RopeConfig(theta=10000.0))
    found = np.asarray(rotate(jnp.asarray(x, dtype), cos, sin), np.float64)
    angle = position * 10000.0 ** (-np.arange(0, 64, 2) / 64)
    first, second = np.split(np.asarray(jnp.asarray(x, dtype), np.float64), 2, axis=-1)
    wanted = np.concatenate([first * np.cos(angle) - second * np.sin(angle),
                             second * np.cos(angle) + first * np.sin(angle)], axis=-1)
    rounding = 2.0**-24 * position + float(jnp.finfo(dtype).eps)
    assert np.abs(found - wanted).max() < 4 * rounding


SPARSE = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 128}


@pytest.mark.parametrize("more", [
    {}, {"num_key_value_heads": 2}, {"head_dim": None}, {"head_dim": 10}, {"rope_theta": 5e5},
    {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": None}, {"tie_word_embeddings": True},
    {"attention_bias": True}, {"mlp_bias": True},
], ids=str)
def test_a_sparse_config_means_what_it_means_to_transformers(more: dict[str, Any]) -> None:
    """Files of older or hand-made checkpoints leave out what equals the defaults."""
    ours, wanted = common_config(SPARSE | more), LlamaConfig(**SPARSE, **more)
    [layer] = set(ours.layers)
    spec, rope = layer.mixer, wanted.rope_parameters
    assert isinstance(layer.mlp, MLPSpec) and isinstance(spec, AttentionSpec)
    assert (spec.num_kv_heads, spec.head_dim) == (wanted.num_key_value_heads, wanted.head_dim)
    assert (ours.tie_embeddings, layer.mlp.bias) == (wanted.tie_word_embeddings, wanted.mlp_bias)
    assert (spec.bias, spec.output_bias) == (wanted.attention_bias, wanted.attention_bias)
    assert spec.rope is not None and (spec.rope.theta, spec.rope.kind) == (rope["rope_theta"], rope["rope_type"])
    assert dict(spec.rope.scaling) == {key: rope[key] for key in ("factor",) if key in rope}


def test_the_default_epsilon_is_that_of_transformers() -> None:
    norm = common_config(SPARSE).norm
    assert norm is not None and norm.eps == LlamaConfig(**SPARSE).rms_norm_eps


@pytest.mark.parametrize(("key", "value"), [
    ("rms_norm_eps", "small"), ("rms_norm_eps", -1.0), ("rms_norm_eps", float("nan")), ("rope_theta", [1]),
    ("rope_parameters", "linear"), ("rope_scaling", [8]), ("rope_scaling", {"rope_type": "linear", "factor": "x"}),
    ("rope_scaling", {"rope_type": "yarn", "factor": float("nan")}), ("eos_token_id", "</s>"), ("eos_token_id", [1.5]),
    ("dtype", "float7"), ("dtype", "float64"), ("num_hidden_layers", 0), ("hidden_size", "64"),
])
def test_a_damaged_config_is_an_error_that_names_the_key(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key.replace("rope_", "rope_|rotary ")):
        model_of(EngineConfig(), CONFIG | {key: value}, "cuda")


def test_a_negative_end_id_stands_for_none() -> None:
    assert common_config(CONFIG | {"eos_token_id": [5, -1]}).eos_token_ids == (5,)
