"""What differs between the architectures of GGUF files: names of tensors and of metadata, and what no file says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How a GGUF architecture is read.

    Attributes:
        architecture, model_type: in Hugging Face terms.
        tensors: GGUF stems, and those of Hugging Face.
        permuted: stems whose rows the converter reorders.
        norms_have_one: the converter adds 1 to the scales of all norms.
        keys: metadata, without the architecture's prefix, and the keys of config.json that it becomes.
        fixed: keys of config.json that no file says.
        derived: further keys, from those that are known already.
        partial_rotary: a part of each head may be rotated.
        transposed: stems whose weights checkpoints store [in, out].
        grouped: stems whose rows checkpoints have by groups of heads: see `weight_rules.grouped_qkv`.
        with_second_norm: what replaces `tensors` where a layer has two norms before it.
        renamed: keys of config.json that this family calls otherwise, and how.
        served_as: the family of the converted checkpoint, where it is read as one of another that is equal.
    """

    architecture: str
    model_type: str
    tensors: dict[str, str]
    permuted: tuple[str, ...] = ()
    norms_have_one: bool = False
    keys: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    derived: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {}
    partial_rotary: bool = False
    transposed: tuple[str, ...] = ()
    grouped: tuple[str, ...] = ()
    with_second_norm: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    served_as: str = ""


def _of_layers(**stems: str) -> dict[str, str]:
    return {f"blk.{{i}}.{stem}": f"model.layers.{{i}}.{name}" for stem, name in stems.items()}


_STEMS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"} | _of_layers(
    attn_norm="input_layernorm", attn_q="self_attn.q_proj", attn_k="self_attn.k_proj", attn_v="self_attn.v_proj",
    attn_output="self_attn.o_proj", ffn_norm="post_attention_layernorm", ffn_gate="mlp.gate_proj",
    ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
_HEAD_NORMS = _of_layers(attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
_POST_NORMS = _of_layers(post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm")
_GEMMA2 = _STEMS | _POST_NORMS | _of_layers(ffn_norm="pre_feedforward_layernorm")
_AFTER = {stem: name for stem, name in _STEMS.items() if not stem.endswith((".attn_norm", ".ffn_norm"))} | _POST_NORMS
_QK = "blk.{i}.attn_q", "blk.{i}.attn_k"
_QKV = ("blk.{i}.attn_qkv",)
_FUSED_MLP = _of_layers(ffn_up="mlp.gate_up_proj")
_WINDOWS = {"attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "sliding_window_pattern"}
_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}


def _without(stems: dict[str, str], *names: str) -> dict[str, str]:
    return {stem: name for stem, name in stems.items() if stem.removeprefix("blk.{i}.") not in names}


def _prefixed(prefix: str, **stems: str) -> dict[str, str]:
    return {f"blk.{{i}}.{stem}": f"{prefix}.{{i}}.{name}" for stem, name in stems.items()}


def _minicpm(config: dict[str, Any]) -> dict[str, Any]:
    """What files do not say that were written before these keys."""
    return {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 * config["num_hidden_layers"] ** -0.5,
            "logits_scaling": config["hidden_size"] / 256, "attention_multiplier": config["head_dim"] ** -0.5}


def _falcon(config: dict[str, Any]) -> dict[str, Any]:
    """All as the newer ones, of which the older ones are a case."""
    return {"num_kv_heads": config["num_key_value_heads"], "ffn_hidden_size": config["intermediate_size"]}


def _gemma_scale(layers: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The 27B models, which have so many layers, scale scores by the width for each head; the others by its size."""
    def derived(config: dict[str, Any]) -> dict[str, Any]:
        per_head = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": per_head if config["num_hidden_layers"] == layers else config["head_dim"]}

    return derived


GGUF_FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", _STEMS, permuted=_QK),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", _STEMS),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", _STEMS | _HEAD_NORMS),
    "gemma": GgufFamily("GemmaForCausalLM", "gemma", _STEMS, norms_have_one=True,
                        fixed={"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": GgufFamily("Gemma2ForCausalLM", "gemma2", _GEMMA2, norms_have_one=True, keys=_WINDOWS | _CAPS,
                         derived=_gemma_scale(46)),
    "gemma3": GgufFamily("Gemma3ForCausalLM", "gemma3_text", _GEMMA2 | _HEAD_NORMS, norms_have_one=True,
                         keys=_WINDOWS | _CAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
                         derived=_gemma_scale(62)),
    "phi3": GgufFamily("Phi3ForCausalLM", "phi3",
                       _without(_STEMS, "attn_q", "attn_k", "attn_v", "ffn_gate") | _FUSED_MLP | _of_layers(
                           attn_qkv="self_attn.qkv_proj"), partial_rotary=True, keys=_WINDOWS | {
                               "rope.scaling.original_context_length": "original_max_position_embeddings"}),
    "glm4": GgufFamily("Glm4ForCausalLM", "glm4", _without(_STEMS, "ffn_gate") | _FUSED_MLP | _of_layers(
        post_attention_norm="post_self_attn_layernorm", post_ffw_norm="post_mlp_layernorm"), partial_rotary=True),
    "granite": GgufFamily("GraniteForCausalLM", "granite", _STEMS, permuted=_QK, keys={
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}),
    "command-r": GgufFamily("CohereForCausalLM", "cohere", _without(_STEMS, "ffn_norm") | _HEAD_NORMS,
                            keys=_LAYER_NORM | {"logit_scale": "logit_scale"}),
    "cohere2": GgufFamily("Cohere2ForCausalLM", "cohere2", _without(_STEMS, "ffn_norm"),
                          keys=_LAYER_NORM | _WINDOWS | {"logit_scale": "logit_scale"}),
    "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", _AFTER | _HEAD_NORMS),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", _STEMS, permuted=_QK),
    "exaone4": GgufFamily("Exaone4ForCausalLM", "exaone4", _AFTER | _HEAD_NORMS, keys=_WINDOWS),
    "mistral3": GgufFamily("Ministral3ForCausalLM", "ministral3", _STEMS, permuted=_QK,
                           keys={"attention.temperature_scale": "llama_4_scaling_beta"},
                           fixed={"rope_parameters": {"rope_type": "default"}}),  # Mistral Small has no other
    "seed_oss": GgufFamily("SeedOssForCausalLM", "seed_oss", _without(_STEMS, "ffn_norm") | _of_layers(
        post_attention_norm="post_attention_layernorm")),
    # The window is in no file, and in all released models.
    "starcoder2": GgufFamily(
        "Starcoder2ForCausalLM", "starcoder2", _without(_STEMS, "ffn_gate", "ffn_up", "ffn_down") | _of_layers(
            ffn_up="mlp.c_fc", ffn_down="mlp.c_proj"), keys=_WINDOWS | {"attention.layer_norm_epsilon": "norm_epsilon"},
        fixed={"hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096}),
    "gpt2": GgufFamily(
        "GPT2LMHeadModel", "gpt2", {
            "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
            "output": "lm_head"} | _prefixed(
                "transformer.h", attn_norm="ln_1", attn_qkv="attn.c_attn", attn_output="attn.c_proj", ffn_norm="ln_2",
                ffn_up="mlp.c_fc", ffn_down="mlp.c_proj"),
        keys={"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "n_inner"},
        transposed=tuple(f"blk.{{i}}.{stem}" for stem in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"))),
    "gptneox": GgufFamily(
        "GPTNeoXForCausalLM", "gpt_neox", {
            "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out",
            } | _prefixed("gpt_neox.layers", attn_norm="input_layernorm", attn_qkv="attention.query_key_value",
                          attn_output="attention.dense", ffn_norm="post_attention_layernorm",
                          ffn_up="mlp.dense_h_to_4h", ffn_down="mlp.dense_4h_to_h"),
        keys={"attention.layer_norm_epsilon": "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        fixed={"hidden_act": "gelu", "attention_bias": True}, partial_rotary=True, grouped=_QKV,
        renamed={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}),
    "falcon": GgufFamily(
        "FalconForCausalLM", "falcon", {
            "token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head",
            } | _prefixed("transformer.h", attn_norm="input_layernorm", attn_qkv="self_attention.query_key_value",
                          attn_output="self_attention.dense", ffn_up="mlp.dense_h_to_4h",
                          ffn_down="mlp.dense_4h_to_h"),
        keys={"attention.layer_norm_epsilon": "layer_norm_epsilon"}, grouped=_QKV, derived=_falcon,
        fixed={"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        with_second_norm=_prefixed("transformer.h", attn_norm="ln_mlp", attn_norm_2="ln_attn")),
    "chatglm": GgufFamily(
        "ChatGLMModel", "chatglm", {
            "token_embd": "transformer.embedding.word_embeddings", "output": "transformer.output_layer",
            "output_norm": "transformer.encoder.final_layernorm",
            } | _prefixed("transformer.encoder.layers", attn_norm="input_layernorm",
                          attn_qkv="self_attention.query_key_value", attn_output="self_attention.dense",
                          ffn_norm="post_attention_layernorm", ffn_up="mlp.dense_h_to_4h",
                          ffn_down="mlp.dense_4h_to_h"),
        fixed={"multi_query_attention": True}, partial_rotary=True, renamed={
            "num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size", "head_dim": "kv_channels",
            "intermediate_size": "ffn_hidden_size", "num_key_value_heads": "multi_query_group_num",
            "max_position_embeddings": "seq_length", "rms_norm_eps": "layernorm_epsilon"},
        derived=lambda config: {"rope_ratio": config["rope_theta"] / 10000}),
    "internlm2": GgufFamily("LlamaForCausalLM", "llama", _STEMS, permuted=_QK, served_as="InternLM2ForCausalLM"),
    "minicpm": GgufFamily(
        "GraniteForCausalLM", "granite", _STEMS, permuted=_QK, derived=_minicpm, served_as="MiniCPMForCausalLM", keys={
            "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling"}),
}
