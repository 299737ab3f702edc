"""What a config.json means: the same as to transformers, or an error that names the key."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.engine.startup import model_of
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.models.config import AttentionSpec, DeltaSpec, ExpertsSpec, LatentSpec, MLPSpec, ModelConfig
from jaxpaged.models.config_checks import NEUTRAL
from jaxpaged.models.hf_config import ACTIVATIONS, eos_ids
from jaxpaged.models.registry import FAMILIES, find_family
from jaxpaged.models.rope_tables import merge_overrides
from jaxpaged.models.rotary import rotary_angles
from jaxpaged.pallas_kernels.routing import RoutingRule
from tests.support.tiny_llama import CONFIG, write_model

# Others have their code in their checkpoints.
KNOWN = [name for name, family in FAMILIES.items() if family.model_type in CONFIG_MAPPING_NAMES]
TYPES = {FAMILIES[name].model_type: name for name in KNOWN}
LONGROPE = {"short_factor": [1.5] * 48, "long_factor": [4.0] * 48, "original_max_position_embeddings": 2048}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 257, "max_position_embeddings": 128}


def read(hf: dict[str, Any]) -> ModelConfig:
    return find_family(hf).config_from_hf(hf)


# Model types with mixtures of experts: in every layer, unless their config says otherwise.
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe", "minimax_m2", "gpt_oss",
            "deepseek_v2", "qwen3_next")
# In all but the first layers.
PARTLY = "glm4_moe", "ernie4_5_moe", "deepseek_v3", "glm4_moe_lite"
LATENT = "deepseek_v2", "deepseek_v3", "glm4_moe_lite"
# The defaults of the one's class would have it rotate 21 numbers of each head, another's choose no experts, and the
# last one's have no attention in two layers.
HEADS = {"glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 6},
         "qwen3_next": {"full_attention_interval": 2}}
# Families that have a rotary table for each type of layer.
BY_LAYER_TYPE = "Gemma3ForCausalLM", "Olmo3ForCausalLM"


def check_equal(ours: ModelConfig, theirs: Any) -> None:
    """Every field that we read, against transformers' config object."""
    heads, head_dim = theirs.num_attention_heads, getattr(theirs, "head_dim", None)
    found = {(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in ours.attention}
    kind = theirs.model_type
    kv_heads = (theirs.num_kv_heads if kind == "falcon" and not theirs.multi_query else 1 if kind == "falcon" else
                None if kind in ("gpt2", "gpt_neox", "opt") else theirs.num_key_value_heads)
    if kind in LATENT:
        assert set(map(latent_sizes, ours.attention)) == {(heads, theirs.kv_lora_rank, theirs.qk_rope_head_dim,
                                                           theirs.qk_nope_head_dim, theirs.v_head_dim,
                                                           theirs.q_lora_rank, theirs.attention_bias)}
    else:
        assert found == {(heads, kv_heads or heads, head_dim or theirs.hidden_size // heads)}
    assert (ours.model_dim, ours.vocab_size, ours.num_layers) == (
        theirs.hidden_size, theirs.vocab_size, theirs.num_hidden_layers)
    activation = first_of(theirs, "hidden_act", "hidden_activation", "activation_function", "activation")
    inner = first_of(theirs, "intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner") or 4 * theirs.hidden_size
    dense = {layer.mlp for layer in ours.layers if isinstance(layer.mlp, MLPSpec)}
    assert {(spec.dim, spec.activation) for spec in dense} <= {(inner, ACTIVATIONS[activation])}
    mixtures = {layer.mlp for layer in ours.layers if isinstance(layer.mlp, ExpertsSpec)}
    assert len(mixtures) == (kind in MIXTURES + PARTLY) and len(dense) == (kind not in MIXTURES)
    if kind in PARTLY:
        first = first_of(theirs, "first_k_dense_replace", "moe_layer_start_index", default=1)
        assert [isinstance(layer.mlp, ExpertsSpec) for layer in ours.layers] == [
            index >= first for index in range(ours.num_layers)]
    for mixture in mixtures:
        check_mixture(mixture, theirs, ACTIVATIONS[activation])
    eps = 1e-5 if kind == "opt" else first_of(theirs, "rms_norm_eps", "layer_norm_eps", "norm_epsilon",
                                              "layer_norm_epsilon")
    assert ours.norm is not None and {layer.norm.eps for layer in ours.layers} == {ours.norm.eps} == {eps}
    assert ours.max_model_len >= theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == eos_ids({"eos_token_id": theirs.eos_token_id}, "theirs")
    # Qwen2 has biases on queries, keys and values whatever its config says, GLM none on the output.
    always = kind in ("gpt2", "gpt_neox", "opt")
    output = always or first_of(theirs, "attention_out_bias", "attention_bias", "use_bias", "bias", default=False)
    assert {spec.output_bias for spec in ours.attention if isinstance(spec, AttentionSpec)} <= {
        output and not kind.startswith("glm")}
    assert {spec.bias for spec in dense} <= {always or first_of(theirs, "mlp_bias", "use_bias", "bias", default=False)}
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    assert [isinstance(layer.mixer, DeltaSpec) for layer in ours.layers] == [
        item == "linear_attention" for item in types]
    types = [layer_type for layer_type in types if layer_type != "linear_attention"]
    windows = [window if layer_type == "sliding_attention" and window and window < theirs.max_position_embeddings
               else None for layer_type in types]
    assert [spec.window for spec in ours.attention] == windows
    rotated = getattr(theirs, "no_rope_layers", None) or [
        kind not in ("gpt2", "opt") if kind not in ("cohere2", "exaone4") else
        window is None or layer_type == "sliding_attention"
        for layer_type in types]
    assert [spec.rope is not None for spec in ours.attention] == list(map(bool, rotated))
    for spec, layer_type in zip(ours.attention, types, strict=True):
        if spec.rope is not None:
            table = theirs.rope_parameters.get(layer_type, theirs.rope_parameters)
            assert (spec.rope.theta, spec.rope.kind) == (table["rope_theta"], table["rope_type"])
            share = table.get("partial_rotary_factor", 1)
            assert (spec.rope.dims or spec.rotary_dim) == int(share * spec.rotary_dim)


def latent_sizes(spec: AttentionSpec | LatentSpec) -> tuple[Any, ...]:
    assert isinstance(spec, LatentSpec)
    return (spec.num_heads, spec.latent_dim, spec.rotary_dim, spec.key_dim, spec.value_dim, spec.query_dim, spec.bias)


def check_mixture(ours: ExpertsSpec, theirs: Any, activation: str) -> None:
    inner = first_of(theirs, "moe_intermediate_size", "intermediate_size")
    count = first_of(theirs, "num_experts", "num_local_experts")
    assert (ours.count, ours.dim, ours.activation) == (count, inner, activation)
    kind, top_k = theirs.model_type, theirs.num_experts_per_tok
    corrected = kind in ("glm4_moe", "minimax_m2", "ernie4_5_moe", "deepseek_v3", "glm4_moe_lite")
    if kind == "phimoe":
        rule = RoutingRule(top_k, normalized=False, margin=2 * theirs.router_jitter_noise)
    elif kind in ("glm4_moe", "deepseek_v3", "glm4_moe_lite"):
        rule = RoutingRule(top_k, True, theirs.n_group, theirs.topk_group, True, theirs.norm_topk_prob,
                           theirs.routed_scaling_factor)
    else:
        rule = RoutingRule(top_k, kind == "minimax_m2", normalized=getattr(theirs, "norm_topk_prob", True))
    assert ours.routing == rule
    shared = getattr(theirs, "shared_expert_intermediate_size", 0)
    others = first_of(theirs, "n_shared_experts", "moe_num_shared_experts", default=0) * inner
    assert (ours.shared_dim, ours.shared_gate, ours.choice_bias) == (shared or others, shared > 0, corrected)


def first_of(theirs: Any, *names: str, default: Any = None) -> Any:
    return next((getattr(theirs, name) for name in names if hasattr(theirs, name)), default)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("given", [
    {}, {"num_key_value_heads": 4}, {"max_position_embeddings": 8192}, {"sliding_window": None},
    {"tie_word_embeddings": True}, {"eos_token_id": [3, 4]}, {"num_hidden_layers": 30, "use_sliding_window": True},
    {"hidden_size": 2048, "num_attention_heads": 64}, {"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 3e4},
], ids=str)
def test_an_absent_key_means_what_it_means_to_transformers(name: str, given: dict[str, Any]) -> None:
    """Of each family's own config class, whatever another family's default is."""
    model_type = FAMILIES[name].model_type
    if "rope_parameters" in given and name in BY_LAYER_TYPE:
        with pytest.raises(CheckpointError, match="a table for full_attention"):
            read({"model_type": model_type, **given})
        return
    if "rope_scaling" in given and name == "Phi3ForCausalLM":  # which knows no other kind
        given = given | {"rope_scaling": LONGROPE | {"type": "longrope"}}
    if "rope_scaling" in given and name in BY_LAYER_TYPE:  # their classes ignore the older name of the key
        given = given | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    if given == {"sliding_window": None} and name == "Exaone4ForCausalLM":  # its class divides by zero without types
        given = given | {"layer_types": ["full_attention"] * 32}
    if "rope_scaling" in given and name == "PhimoeForCausalLM":  # which wants these with any kind
        given = given | {"rope_scaling": {
            "rope_type": "longrope", "short_factor": [1.5] * 64, "long_factor": [4.0] * 64, "short_mscale": 1.2,
            "long_mscale": 1.2, "original_max_position_embeddings": 4096}}
    given = HEADS.get(model_type, {}) | given
    theirs = AutoConfig.for_model(model_type, **json.loads(json.dumps(given)))
    check_equal(read({"model_type": model_type, **given}), theirs)
    check_equal(read({"architectures": [name], **given}), theirs)


@pytest.mark.parametrize("name", KNOWN)
def test_every_default_is_transformers(name: str) -> None:
    """Also of keys that the comparison of configs does not look at."""
    family = FAMILIES[name]
    theirs = AutoConfig.for_model(family.model_type)
    defaults = dict(family.defaults)
    assert (defaults.pop("architectures"), defaults.pop("model_type")) == ([name], type(theirs).model_type)
    if "rope_theta" in defaults:
        table = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
        assert defaults.pop("rope_theta") == table["rope_theta"]
        assert defaults.pop("partial_rotary_factor", 1) == table.get("partial_rotary_factor", 1)
    for key, value in defaults.items():
        field = type(theirs).__dataclass_fields__[key]  # before it is completed by other keys
        assert value == field.default, key


def test_as_many_heads_of_keys_as_of_queries_where_null_says_so() -> None:
    for model_type in ("llama", "qwen2", "qwen3"):
        given = {"num_attention_heads": 16, "num_key_value_heads": None}
        check_equal(read({"model_type": model_type, **given}), AutoConfig.for_model(model_type, **given))


def test_mistral_without_its_keys() -> None:
    ours = read({"model_type": "mistral"})
    assert {(spec.window, spec.num_kv_heads) for spec in ours.attention} == {(4096, 8)}
    assert {spec.window for spec in read({"model_type": "mistral", "sliding_window": None}).attention} == {None}


# As on the hub: keys that older versions of transformers wrote, and others that say nothing about the model.
HUB: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000},
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1e6, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "use_sliding_window": False, "vocab_size": 151936},
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
        "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256, "hidden_size": 1152,
        "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 6912, "max_position_embeddings": 32768,
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144},
    "phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "full_attn_mod": 1,
        "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
        "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064},
    "phi-3-mini-128k": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "sliding_window": 262144, "rope_scaling": {
            "long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"}},
    "c4ai-command-r7b": {
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "cache_implementation": "hybrid",
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps": 1e-5, "layer_switch": 4,
        "logit_scale": 0.25, "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
        "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True},
    "exaone-4.0-32b": {
        "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "head_dim": 128, "hidden_size": 5120,
        "intermediate_size": 27392, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
        "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 64,
        "num_key_value_heads": 8, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
        "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536, "max_window_layers": 28, "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
        "use_sliding_window": False},
    "olmo-3-7b": {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "max_position_embeddings": 65536,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                         "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000},
    "glm-4-9b-0414": {
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
}


@pytest.mark.parametrize(("changes", "layers"), [
    ({}, {0, 1, 2, 3}), ({"decoder_sparse_step": 2}, {1, 3}), ({"mlp_only_layers": [0, 3]}, {1, 2}),
    ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {3}), ({"mlp_only_layers": None}, {0, 1, 2, 3})], ids=str)
@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_which_layers_have_experts(model_type: str, changes: dict[str, Any], layers: set[int]) -> None:
    found = read({"model_type": model_type, "num_hidden_layers": 4, **changes})
    assert {index for index, layer in enumerate(found.layers) if isinstance(layer.mlp, ExpertsSpec)} == layers


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe"])
def test_the_number_of_experts_has_two_names(model_type: str, key: str) -> None:
    config = read({"model_type": model_type, key: 12, **HEADS.get(model_type, {})})
    assert {layer.mlp.count for layer in config.layers if isinstance(layer.mlp, ExpertsSpec)} == {12}
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok \(13\) must be at most the number of experts \(12"):
        read({"model_type": model_type, key: 12, **HEADS.get(model_type, {}), "num_experts_per_tok": 13})


@pytest.mark.parametrize("name", HUB)
def test_configs_of_released_models(name: str) -> None:
    given = {key: value for key, value in HUB[name].items() if key != "architectures"}
    check_equal(read(HUB[name]), AutoConfig.for_model(**json.loads(json.dumps(given))))


# Rotary tables


def check_angles(hf: dict[str, Any], layer: int = 0, layer_type: str | None = None) -> None:
    """Angles against those of transformers' own function, at positions of all sizes."""
    torch = pytest.importorskip("torch", reason="torch is there on Python 3.11 only")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    spec = read(hf).attention[layer]
    given = json.loads(json.dumps({key: value for key, value in hf.items() if key != "architectures"}))
    theirs = AutoConfig.for_model(**given)
    table = theirs.rope_parameters[layer_type] if layer_type else theirs.rope_parameters
    if table["rope_type"] == "default":
        frequency, magnitude = table["rope_theta"] ** (-torch.arange(0, spec.head_dim, 2) / spec.head_dim), 1.0
    else:
        frequency, magnitude = ROPE_INIT_FUNCTIONS[table["rope_type"]](theirs, "cpu", layer_type=layer_type)
    position = np.array([0, 1, 7, 31, 32, 100, 127])
    assert spec.rope is not None
    cos, sin = rotary_angles(jnp.asarray(position), spec.head_dim, spec.rope)
    angle = position[:, None] * frequency.double().numpy()
    np.testing.assert_allclose(cos, np.cos(angle) * magnitude, atol=2e-5)
    np.testing.assert_allclose(sin, np.sin(angle) * magnitude, atol=2e-5)


ROTARY: dict[str, dict[str, Any]] = {
    "both, the old one wins": {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "both with a base": {"rope_scaling": YARN | {"rope_theta": 5e3}, "rope_parameters": {"rope_type": "linear",
                                                                                        "factor": 2.0}},
    "both, the base outside": {"rope_scaling": YARN, "rope_theta": 5e3, "rope_parameters": {"rope_theta": 5e3}},
    "linear wins over yarn": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN},
    "an empty old one": {"rope_scaling": {}, "rope_parameters": YARN},
    "null": {"rope_scaling": None, "rope_parameters": YARN},
    "old names": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "both names": {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4.0}},
    "betas": {"rope_scaling": YARN | {"beta_fast": 8, "beta_slow": 2, "original_max_position_embeddings": 4096}},
    "null betas": {"rope_scaling": YARN | {"beta_fast": None, "beta_slow": None, "attention_factor": None}},
    "mscale": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    "mscale alone": {"rope_scaling": YARN | {"mscale": 0.7}},
    "a given factor": {"rope_scaling": YARN | {"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "not truncated": {"rope_scaling": YARN | {"truncate": False}},
    "no factor": {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}},
    "no original length": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "original length outside": {"rope_scaling": YARN, "original_max_position_embeddings": 16},
    "llama3": {"rope_scaling": LLAMA3},
    "llama3 with the length outside": {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "numbers of other kinds": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 8.0}},
}


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_rotary_tables_mean_what_they_mean_to_transformers(name: str, model_type: str) -> None:
    check_angles({"model_type": model_type, **SIZES, "head_dim": 64, **ROTARY[name]})


def test_nested_tables_belong_to_their_layers() -> None:
    types = ["sliding_attention", "full_attention"]
    nested = {"full_attention": YARN | {"rope_theta": 5e3}, "sliding_attention": {"rope_type": "default"}}
    for key in ("rope_parameters", "rope_scaling"):
        hf = {"model_type": "qwen3", **SIZES, "head_dim": 64, "layer_types": types, "use_sliding_window": True,
              "sliding_window": 16, key: nested}
        check_angles(hf, 0, "sliding_attention")
        check_angles(hf, 1, "full_attention")
        assert [spec.window for spec in read(hf).attention] == [16, None]
        # Such a layer keeps its own table where its window is wider than the context.
        ropes = [spec.rope and spec.rope.kind for spec in read(hf | {"sliding_window": 4096}).attention]
        assert ropes == ["default", "yarn"]
        unrotated = read(hf | {key: nested | {"sliding_attention": None}}).attention
        assert [spec.rope is None for spec in unrotated] == [True, False]
        with pytest.raises(CheckpointError, match="sliding_attention"):
            read(hf | {key: {"full_attention": YARN}})


@pytest.mark.parametrize(("changes", "text"), [
    ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}}, "add rope_theta to rope_scaling"),
    ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'ntk' is not supported"),
    ({"rope_scaling": {"rope_type": "dynamic"}}, "factor"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, "at least 4 rotated numbers"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "'mrope' is not supported"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "mrope_section"),
    ({"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": 3}}, "full_attention must be an object or null"),
    ({"rope_parameters": YARN | {"factor": -2.0}}, "factor of the rotary scaling must be a positive number"),
    ({"rope_parameters": YARN | {"beta_fast": "x"}}, "beta_fast"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
])
def test_rotary_tables_that_cannot_be_served(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        read(CONFIG | {"rope_theta": None} | changes)


@pytest.mark.parametrize("file", [
    {"rope_theta": 5e3}, {"rope_theta": 5e3, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}, {"rope_parameters": LLAMA3 | {"rope_theta": 5e3}},
], ids=str)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_an_overriding_table_takes_the_place_of_the_files(file: dict[str, Any], key: str) -> None:
    """In whatever spelling either is; the base stays the file's unless the new table has one."""
    hf = {"model_type": "llama", **SIZES, **file}
    for table, theta in ((YARN, 5e3), (YARN | {"rope_theta": 3e4}, 3e4)):
        config = model_of(EngineConfig(hf_overrides={key: table}), hf, "cpu").config
        rope = config.attention[0].rope
        assert rope is not None and (rope.theta, rope.kind) == (theta, "yarn")
        assert merge_overrides(merge_overrides(hf, {key: table}), {key: table}) == merge_overrides(hf, {key: table})
    rope = model_of(EngineConfig(hf_overrides={key: None}), hf, "cpu").config.attention[0].rope
    assert rope is not None and (rope.theta, rope.kind) == (5e3, "default")


# Which family


def test_without_architectures_the_model_type_decides() -> None:
    for model_type, name in TYPES.items():
        more = HEADS.get(model_type, {})
        assert read({"model_type": model_type, **more}).architecture == name
        for names in (None, list[str]()):
            assert read({"model_type": model_type, "architectures": names, **more}).architecture == name
        stem = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        assert read({"architectures": [f"{stem}Model"], **more}).architecture == name
    # Of several the first that is served.
    assert read({"architectures": ["LlamaForSomethingElse", "LlamaForCausalLM"]}).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(("hf", "text"), [
    ({}, "names neither architectures nor model_type"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
    ({"architectures": [3]}, "architectures must be a list"),
    ({"model_type": 3}, "model_type must be a name"),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"},
     "architectures says LlamaForCausalLM, but model_type says qwen2"),
    ({"architectures": ["Qwen3ForCausalLM"], "model_type": "rwkv"}, "model_type says rwkv"),
    ({"model_type": "rwkv"}, "the model type rwkv is not supported; supported are .*, LlamaForCausalLM"),
    ({"architectures": ["RwkvForCausalLM"]}, "architecture RwkvForCausalLM is not supported; supported are .*, Llama"),
])
def test_a_config_without_a_family(hf: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        find_family(hf)


@pytest.mark.parametrize(("model_type", "nearest", "more", "fewer"), [
    ("nemotron", "LlamaForCausalLM", "norm_eps", "rms_norm_eps"),
    ("bamba", "LlamaForCausalLM", "mamba_chunk_size", None),
    ("olmo", "Olmo2ForCausalLM", "clip_qkv", "rms_norm_eps"),
    ("persimmon", "GPTNeoXForCausalLM", "qk_layernorm", "use_parallel_residual"),
])
def test_an_unknown_architecture_is_compared_with_the_known_ones(
    model_type: str, nearest: str, more: str | None, fewer: str | None,
) -> None:
    """By the config that transformers writes for it."""
    hf = AutoConfig.for_model(model_type).to_dict() | {"architectures": ["SomeForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match=f"most like that of {nearest}") as caught:
        find_family(hf)
    text = str(caught.value)
    assert more is None or more in text.partition("has ")[2].partition(" besides")[0]
    assert fewer is None or fewer in text.partition("lacks ")[2]


@pytest.mark.parametrize("hf", [{"architectures": ["RwkvForCausalLM"]}, {"model_type": "mpt"}], ids=str)
def test_the_family_comes_before_the_files(hf: dict[str, Any], tmp_path: Path) -> None:
    """A model that is not supported is not called incomplete, even if all its files are missing."""
    config = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")} | hf
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="is not supported; supported are"):
        open_checkpoint(tmp_path)


# Keys that must not be ignored


@pytest.mark.parametrize(("key", "value"), [
    ("logit_scale", 0.5), ("logits_scaling", 8.0), ("embedding_multiplier", 12.0), ("attention_multiplier", 0.01),
    ("partial_rotary_factor", 0.5), ("use_qk_norm", True), ("num_local_experts", 8), ("is_causal", False),
    ("no_rope_layers", [1, 0]), ("layer_types", ["full_attention", "sliding_attention"]), ("sliding_window", 64),
    ("clip_qkv", 8.0), ("rope_interleaved", True), ("final_logit_softcapping", 30.0), ("kv_lora_rank", 512)])
def test_a_key_that_changes_the_result_is_named(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {key} is .*--hf-overrides '\{{\"{key}\": null"):
        read(CONFIG | {key: value})
    assert read(merge_overrides(CONFIG | {key: value}, {key: None})) == read(CONFIG)


def test_values_that_change_nothing_are_accepted() -> None:
    plain = read(CONFIG)
    for key, values in NEUTRAL.items():
        for value in values:
            assert read(CONFIG | {key: value}) == plain, key
    assert read(CONFIG | {"no_rope_layers": [1, 1], "layer_types": ["full_attention"] * 2}) == plain


@pytest.mark.parametrize(("model_type", "changes", "error"), [
    ("cohere2", {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0}, None),
    ("cohere2", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma", {"hidden_act": "relu", "hidden_activation": "gelu"}, "hidden_activation"),
    ("phi3", {"rope_scaling": LONGROPE | {"rope_type": "longrope"}}, "short_factor .* list of 4"),
    ("llama", {"rope_scaling": LONGROPE | {"rope_type": "longrope"}}, "short_factor .* list of 4"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}}, None),
    ("phi3", {"partial_rotary_factor": 0.375}, "partial_rotary_factor"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types": ["full_attention"] * 2}, None),
    ("qwen3_moe", {"mlp_only_layers": ["first"]}, "mlp_only_layers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen2_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("glm4_moe", {"n_group": 3}, "n_group"), ("glm4_moe", {"n_group": 8, "topk_group": 9}, "topk_group"),
    ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts"),
    ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v2", {"num_experts_per_tok": 6, "topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek_v2", {"num_experts_per_tok": 6, "norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok"), ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
    ("minimax_m2", {"rotary_dim": 200}, "rotary_dim"),
    ("phimoe", {"rope_scaling": {"type": "longrope", "short_mscale": 1.1, "long_mscale": 1.2}}, "short_mscale"),
    ("granite", {"attention_multiplier": 0}, "attention_multiplier"),
    ("glm", {"rope_parameters": YARN | {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, None),
    ("glm", {"rope_scaling": {"type": "linear", "factor": 2.0, "short_mscale": 1.2}}, "short_mscale"),
    ("ministral3", {"layer_types": ["chunked_attention"] * 2, "sliding_window": 9}, "layer_types"),
])
def test_what_one_family_alone_reads(model_type: str, changes: dict[str, Any], error: str | None) -> None:
    hf = {"model_type": model_type, **SIZES, "head_dim": 8, **changes}
    if error is None:
        read(hf)
        return
    with pytest.raises(CheckpointError, match=error):
        read(hf)


def test_what_transformers_reader_refuses_is_read() -> None:
    """Nulls, and a dtype that names none."""
    nulls = dict.fromkeys(("attention_bias", "mlp_bias", "rms_norm_eps", "hidden_act", "tie_word_embeddings",
                           "rope_theta", "rope_scaling", "torch_dtype"))
    ours = read({"model_type": "llama", **SIZES, **nulls, "dtype": "auto"})
    assert ours == read({"model_type": "llama", **SIZES})


@pytest.mark.parametrize(("key", "value"), [
    ("attention_bias", "no"), ("mlp_bias", 2), ("tie_word_embeddings", "true"), ("max_window_layers", "all"),
    ("hidden_act", ["silu"])])
def test_a_value_of_the_wrong_type_is_named(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        read({"model_type": "qwen2", **SIZES, "use_sliding_window": True, "sliding_window": 16, key: value})


ODD: tuple[Any, ...] = (
       None, True, False, 0, 1, -1, 2**70, 10**400, 1.5, float("nan"), float("inf"), "x", "", [], {}, [1], ["a"],
       [None], [{}], {"a": 1}, {"rope_type": 3}, {"type": ["x"]}, {"rope_type": "yarn", "factor": [1]},
       {"full_attention": {}}, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": -1},
       {"rope_theta": {}}, {"rope_type": "llama3"}, {"sliding_attention": None})
KEYS = sorted({*NEUTRAL, *(key for family in FAMILIES.values() for key in family.defaults), "rope_scaling",
               "rope_parameters", "dtype", "quantization_config", "original_max_position_embeddings"} - {"model_type"})


@settings(max_examples=300)
@given(name=st.sampled_from(sorted(FAMILIES)),
       changes=st.dictionaries(st.sampled_from(KEYS), st.sampled_from(ODD), min_size=1, max_size=3))
def test_no_value_does_worse_than_an_error(name: str, changes: dict[str, Any]) -> None:
    model_type = FAMILIES[name].model_type
    hf = {"model_type": model_type, **SIZES, **HEADS.get(model_type, {}), **changes}
    try:
        assert read(hf).num_layers <= 10_000
    except CheckpointError as error:
        named = (key.removeprefix("rope_").removesuffix("_parameters").removesuffix("s") for key in changes)
        assert any(key in str(error) for key in (*named, "rotary"))


# Quantized weights


@pytest.mark.parametrize(("table", "method"), [
    ({"quant_method": "aqlm", "bits": 2}, r"aqlm \(2 bits\)"), ({"quant_method": "quark"}, "quark"),
    ({"load_in_4bit": True}, "bitsandbytes"), ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ({"quant_algo": "FP8"}, "modelopt's FP8"), ("x", "an unknown method"), ({"a": 1}, "an unknown method")], ids=str)
def test_quantized_weights_are_refused_by_their_method(table: Any, method: str, tmp_path: Path) -> None:
    """In config.json or in a file next to it; plain weights as well, unless told that they are."""
    folder = write_model(tmp_path / "model", CONFIG | {"quantization_config": table})
    with pytest.raises(UnsupportedModelError, match=f"quantized by {method}, which is not supported"):
        open_checkpoint(folder)
    with pytest.raises(UnsupportedModelError, match=f"quantized by {method}, which is not supported"):
        model_of(EngineConfig(), CONFIG | {"quantization_config": table}, "cpu")
    open_checkpoint(folder, {"quantization_config": None})
    if isinstance(table, dict):
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
            file = folder / name
            file.write_text(json.dumps({"quantization": table} if name.startswith("hf") else table))
            with pytest.raises(UnsupportedModelError, match=f"{name} says .* quantized by {method}"):
                open_checkpoint(folder)
            open_checkpoint(folder, {"quantization_config": None})
            file.unlink()
