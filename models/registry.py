"""Which family serves which architecture name of config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.models import (
    baichuan,
    chatglm,
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    ernie4_5_moe,
    exaone4,
    falcon,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granite_moe,
    internlm2,
    internlm3,
    llama,
    minicpm,
    minimax_m2,
    ministral,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    starcoder2,
)
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import MeshAxes
from jaxpaged.models.text_part import text_config
from jaxpaged.models.transformer import Transformer
from jaxpaged.models.weight_rules import WeightRule


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family: how its config is read, how its module is built, and where its weights come from.

    Attributes:
        models, sizes, tested: released models of this family, sizes of them that were tried, and how it is tested, for
            people.
        defaults: what an absent key of config.json means, as in transformers' config class; `architectures` and
            `model_type` among them.
        windows: which layers may have a sliding window, for people; empty: none.
        types: other model_types that a config.json of this family may name.
        also: architectures of other families, which a config.json of this model_type may name, too.
    """

    models: str
    sizes: str
    tested: str
    defaults: dict[str, Any]
    config_from_hf: Callable[[dict[str, Any]], ModelConfig]
    weights: tuple[WeightRule, ...]
    ignored: tuple[str, ...]
    windows: str = ""
    also: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        """transformers' name of the family."""
        return str(self.defaults["model_type"])

    def build(self, config: ModelConfig, dtype: jnp.dtype, seed: int = 0, axis: MeshAxes = None) -> Transformer:
        """The module with random weights. For `axis` see there."""
        return Transformer(config, dtype=dtype, rngs=nnx.Rngs(seed), axis=axis)

    def outline(self, config: ModelConfig, dtype: jnp.dtype, axis: MeshAxes = None) -> Transformer:
        """The module with the shapes of its weights alone; nothing is drawn."""
        return nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=_OneKey(), axis=axis))


class _OneKey(nnx.Rngs):
    """The same key for every draw: counting draws takes most of the time that an outline takes."""

    def __init__(self) -> None:
        super().__init__()

    def params(self) -> jax.Array:
        return jax.random.key(0)


_TINY = "logits and greedy ids of tiny checkpoints, against transformers in float32"


_TWIN = "logits of tiny checkpoints, against those of an equal model of transformers in float32"


def _family(
    models: str, module: ModuleType, windows: str = "", sizes: str = "tiny ones", tested: str = _TINY,
    also: tuple[str, ...] = (), types: tuple[str, ...] = (),
) -> ModelFamily:
    return ModelFamily(models, sizes, tested, module.DEFAULTS, module.config_from_hf, module.WEIGHTS, module.IGNORED,
                       windows, also, types)


_LLAMA = ModelFamily(
    "Llama 2 and 3, SmolLM2", "135M with its real weights; 8B and 70B planned, and their layers compiled for GPUs",
    f"{_TINY}; SmolLM2-135M's ids on whole workloads", llama.DEFAULTS, llama.config_from_hf, llama.WEIGHTS,
    llama.IGNORED)

_MISTRAL = ModelFamily("Mistral 7B, Mistral Nemo", "tiny ones", _TINY, mistral.DEFAULTS, mistral.config_from_hf,
                       mistral.WEIGHTS, mistral.IGNORED, "every layer")

_QWEN2 = ModelFamily("Qwen2 and Qwen2.5", "tiny ones; 72B planned", _TINY, qwen2.DEFAULTS, qwen2.config_from_hf,
                     qwen2.WEIGHTS, qwen2.IGNORED, "layers from max_window_layers on")

_QWEN3 = ModelFamily("Qwen3, dense", "tiny ones", _TINY, qwen3.DEFAULTS, qwen3.config_from_hf, qwen3.WEIGHTS,
                     qwen3.IGNORED, "layers from max_window_layers on")

_BAICHUAN = _family("Baichuan 7B and 13B, Baichuan 2", baichuan, tested=_TWIN)

_CHATGLM = _family("ChatGLM 2 and 3, GLM-4 in its first format", chatglm, tested=_TWIN)

FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "MixtralForCausalLM": _family("Mixtral 8x7B and 8x22B", mixtral, "every layer"),
    "Qwen2MoeForCausalLM": _family("Qwen1.5-MoE, Qwen2-57B-A14B", qwen2_moe, "every other layer"),
    "Qwen3MoeForCausalLM": _family("Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", qwen3_moe, "every layer"),
    "Qwen3NextForCausalLM": _family("Qwen3-Next", qwen3_next),
    "OlmoeForCausalLM": _family("OLMoE", olmoe),
    "DeepseekV3ForCausalLM": _family("DeepSeek-V3, DeepSeek-R1, Kimi K2", deepseek_v3, types=("kimi_k2",)),
    "DeepseekV2ForCausalLM": _family("DeepSeek-V2, DeepSeek-V2-Lite", deepseek_v2),
    "Glm4MoeLiteForCausalLM": _family("GLM-4.7-Flash", glm4_moe_lite),
    "GptOssForCausalLM": _family("gpt-oss-20b, gpt-oss-120b", gpt_oss, "every other layer"),
    "Glm4MoeForCausalLM": _family("GLM-4.5, GLM-4.6, GLM-4.7", glm4_moe),
    "GraniteMoeForCausalLM": _family("Granite 3, with experts", granite_moe),
    "PhimoeForCausalLM": _family("Phi-3.5-MoE", phimoe, "every layer"),
    "MiniMaxM2ForCausalLM": _family("MiniMax-M2", minimax_m2),
    "Ernie4_5_MoeForCausalLM": _family("ERNIE 4.5, with experts", ernie4_5_moe),
    "GemmaForCausalLM": _family("Gemma, CodeGemma", gemma),
    "Gemma2ForCausalLM": _family("Gemma 2", gemma2, "every other layer", "tiny ones; layers of 9B compiled for GPUs"),
    "Gemma3ForCausalLM": _family("Gemma 3, the text part of multimodal ones included", gemma3, "five of six layers",
                                  "270M with its real weights; layers of 27B compiled for GPUs"),
    "Phi3ForCausalLM": _family("Phi-3, Phi-3.5, Phi-4, Phi-4-mini", phi3, "every layer"),
    "GlmForCausalLM": _family("GLM-4", glm),
    "Glm4ForCausalLM": _family("GLM-4-0414, GLM-Z1", glm4),
    "GraniteForCausalLM": _family("Granite 3, dense", granite),
    "CohereForCausalLM": _family("Command R, Aya", cohere),
    "Cohere2ForCausalLM": _family("Command A, Command R7B", cohere2, "three of four layers"),
    "Olmo2ForCausalLM": _family("OLMo 2", olmo2),
    "Olmo3ForCausalLM": _family("OLMo 3", olmo3, "three of four layers"),
    "SmolLM3ForCausalLM": _family("SmolLM3", smollm3, "layers that are not rotated"),
    "Exaone4ForCausalLM": _family("EXAONE 4", exaone4, "three of four layers"),
    "SeedOssForCausalLM": _family("Seed-OSS", seed_oss),
    "MinistralForCausalLM": _family("Ministral 8B", ministral, "those that layer_types names"),
    "Ministral3ForCausalLM": _family("Ministral 3, its text part", ministral3, "every layer"),
    "Starcoder2ForCausalLM": _family("StarCoder2", starcoder2, "every layer"),
    "GPT2LMHeadModel": _family("GPT-2, DistilGPT2", gpt2),
    "GPTNeoXForCausalLM": _family("Pythia, GPT-NeoX", gpt_neox),
    "FalconForCausalLM": _family("Falcon, Falcon 2", falcon),
    "OPTForCausalLM": _family("OPT", opt),
    "InternLM2ForCausalLM": _family("InternLM2, InternLM2.5", internlm2, tested=_TWIN),
    "InternLM3ForCausalLM": _family("InternLM3", internlm3, tested=_TWIN, also=("LlamaForCausalLM",)),
    "MiniCPMForCausalLM": _family("MiniCPM 1 and 2, dense", minicpm, tested=_TWIN),
    "BaichuanForCausalLM": _BAICHUAN,
    "BaiChuanForCausalLM": _BAICHUAN,
    "ChatGLMModel": _CHATGLM,
    "ChatGLMForConditionalGeneration": _CHATGLM,
}


# Keys of every config.json that say nothing about what is computed.
_META = frozenset({
    "architectures", "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "tokenizer_class", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout",
    "_name_or_path", "_attn_implementation", "return_dict", "output_hidden_states", "output_attentions",
    "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "pretraining_tp", "is_encoder_decoder",
    "rope_scaling", "rope_parameters", "rope_theta"})


def find_family(hf: dict[str, Any]) -> ModelFamily:
    """The family of a config.json: that of `architectures`, or without it of `model_type`.

    The decoder without a head, such as LlamaModel, is of the same family.

    Raises:
        UnsupportedModelError: no family serves this architecture; the text lists those that exist, and says which of
            them is the most alike.
        CheckpointError: the file names neither, or two that contradict each other.
    """
    hf = text_config(hf)
    names, model_type = hf.get("architectures") or [], hf.get("model_type")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError("config.json: architectures must be a list of names of model classes")
    if model_type is not None and not isinstance(model_type, str):
        raise CheckpointError("config.json: model_type must be a name")
    if not names:
        if model_type is None:
            raise CheckpointError("config.json names neither architectures nor model_type, so nothing says which model "
                                  "this is")
        for family in FAMILIES.values():
            if model_type in (family.model_type, *family.types):
                return family
        raise _unsupported(hf, f"the model type {model_type}")
    served = (FAMILIES.get(name) or FAMILIES.get(f"{name.removesuffix('Model')}ForCausalLM")
              or FAMILIES.get(f"{name.removesuffix('Model')}LMHeadModel") for name in names)
    found = next((family for family in served if family), None)
    if found is None:
        raise _unsupported(hf, f"the architecture {', '.join(names)}")
    shared = found.defaults["architectures"][0]
    found = next((family for family in FAMILIES.values() if family.model_type == model_type and shared in family.also),
                 found)
    if model_type not in (None, found.model_type, *found.types):
        raise CheckpointError(
            f"config.json: architectures says {found.defaults['architectures'][0]}, but model_type says {model_type}, "
            f"not {found.model_type}; name the right one, for instance by --hf-overrides "
            f"'{{\"model_type\": \"{found.model_type}\"}}'")
    return found


def _unsupported(hf: dict[str, Any], what: str) -> UnsupportedModelError:
    """With the family whose keys are most like those of the config."""
    keys = {key for key in hf.keys() - _META if not key.endswith(("dropout", "pdrop"))}

    def likeness(name: str) -> float:
        known = FAMILIES[name].defaults.keys() - _META
        return len(keys & known) / (len(keys | known) or 1)

    nearest = max(FAMILIES, key=likeness)
    text = f"{what} is not supported; supported are {', '.join(sorted(FAMILIES))}"
    if not keys & FAMILIES[nearest].defaults.keys():
        return UnsupportedModelError(text)
    known = {key: value for key, value in FAMILIES[nearest].defaults.items() if key not in _META}
    more = _some(sorted(keys - known.keys()))
    fewer = _some(sorted(key for key, value in known.items() if key not in keys and value is not None))
    differs = [f"has {more} besides"] * bool(more) + [f"lacks {fewer}"] * bool(fewer)
    return UnsupportedModelError(f"{text}. Its config is most like that of {nearest}"
                                 + (f", but {' and '.join(differs)}" if differs else ""))


def _some(items: list[str]) -> str:
    return ", ".join(items[:12]) + (f" and {len(items) - 12} more" if len(items) > 12 else "")
