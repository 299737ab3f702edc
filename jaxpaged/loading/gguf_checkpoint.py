"""A GGUF file as a checkpoint in Hugging Face terms: config keys, tensor names, row order."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.gguf_blocks import pack
from jaxpaged.loading.gguf_families import GGUF_FAMILIES
from jaxpaged.loading.gguf_split import SplitGguf
from jaxpaged.models.quantization import GGUF_BLOCKS, PANEL, PackedType, StoredType


def gguf_names(architecture: str) -> tuple[str, ...]:
    """What GGUF files call an architecture of config.json."""
    return tuple(name for name, family in GGUF_FAMILIES.items()
                 if (family.served_as or family.architecture) == architecture)


_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.")
# Llama 3.1 and later: the file holds what the scaling does to each frequency, not the numbers it was made from. All
# released models share these.
_ROPE_FACTORS = "rope_freqs.weight"
# longrope's, for texts within the original context and for longer ones.
_LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
_ROTARY = _ROPE_FACTORS, *_LONGROPE.values()
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
# Keys that say whether fused queries, keys and values have a bias.
_QKV_BIASES = {"falcon": "bias", "chatglm": "add_qkv_bias"}
# Metadata that changes what a model computes, and the values of each that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,), "attention.sliding_window": (0,), "attention.causal": (True,), "attention.scale": (),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "logit_scale": (0, 1), "residual_scale": (0, 1),
    "embedding_scale": (0, 1), "rope.scaling.alpha": (0, 1), "use_parallel_residual": (False,),
    "rope.freq_base_swa": (), "attention.sliding_window_pattern": (),
}


class GgufCheckpoint:
    """A GGUF file, or all parts of a split one, read as a checkpoint.

    Attributes:
        path: the file, or one of the parts.
        config: the keys that config.json would have.
        generation_config: empty; GGUF has no such file.
        quantization: gguf, also where all tensors are plain.

    Raises:
        CheckpointError: the file is damaged, or lacks what a model needs.
        UnsupportedModelError: an architecture, or a feature of it, that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.quantization: str | None = "gguf"
        self._file = SplitGguf(path)
        self._metadata = self._file.metadata
        self._name = self._metadata.get("general.architecture")
        if not isinstance(self._name, str) or self._name not in GGUF_FAMILIES:
            raise UnsupportedModelError(f"{path}: GGUF architecture {_brief(self._name)} is not supported; "
                                        f"supported are {', '.join(GGUF_FAMILIES)}{self._most_like()}")
        self._family = GGUF_FAMILIES[self._name]
        self._stems = self._family.tensors | (self._family.with_second_norm if self._has("attn_norm_2.weight") else {})
        self._sources = {self._hf_name(name): name for name in self._file.tensors if name not in _ROTARY}
        self.config = self._make_config()
        self.generation_config: dict[str, Any] = {}

    def _most_like(self) -> str:
        """Which family's tensors are most like the file's, and what differs."""
        stems = {_generic(name.rpartition(".")[0]) for name in self._file.tensors if name not in _ROTARY}

        def likeness(name: str) -> float:
            known = GGUF_FAMILIES[name].tensors.keys()
            return len(stems & known) / (len(stems | known) or 1)

        nearest = max(GGUF_FAMILIES, key=likeness)
        known = GGUF_FAMILIES[nearest].tensors.keys()
        if not stems & known:
            return ""
        more, fewer = (", ".join(sorted(items)[:8]) for items in (stems - known, known - stems - {"output"}))
        differs = [f"has {more[:400]} besides"] * bool(more) + [f"lacks {fewer}"] * bool(fewer)
        return f". Its tensors are most like those of {nearest}" + (f", but {' and '.join(differs)}" if differs else "")

    def names(self) -> set[str]:
        """Tensor names in Hugging Face's spelling; one that has no such spelling keeps its own."""
        return set(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, [out, in] for linear layers."""
        source = self._sources[name]
        stored = self._file.tensors[source].shape
        return stored[::-1] if self._is(source, self._family.transposed) else stored

    def stored_type(self, name: str) -> StoredType:
        """The type that a tensor is stored in; empty without a tensor."""
        if name not in self._sources:
            return ""
        source = self._sources[name]
        found = self._file.tensors[source].type_name
        if found in GGUF_BLOCKS:
            # Where numbers are in another order, blocks as they are would not do.
            return (f"{found} in another order" if self._is(source, (*self._family.transposed, *self._family.grouped))
                    else PackedType(found, GGUF_BLOCKS[found]))
        return _DTYPES.get(found, found)

    def read_tensor(
        self, name: str, out: np.ndarray | None = None, part: tuple[slice, ...] | None = None
    ) -> np.ndarray:
        """Dequantize a tensor, or a part, into `out` (any float dtype and strides), or into a new float32 array."""
        source, shape = self._sources[name], self.shape(name)
        part = part or tuple(slice(0, size) for size in shape)
        if out is None:
            out = np.empty([item.stop - item.start for item in part], np.float32)
        if self._is(source, self._family.transposed):
            self._file.read_tensor(source, out.T, part[::-1])
            return out
        if self._is(source, self._family.grouped):
            order = self._file_rows(shape[0])[part[0]]
            whole = np.empty(shape, np.float32)
            self._file.read_tensor(source, whole, tuple(slice(0, size) for size in shape))
            out[...] = whole[order][(slice(None), *part[1:])]
            return out
        heads = self._permuted_heads(source)
        if heads is None:
            if not (self._family.norms_have_one and source.endswith("norm.weight")):
                self._file.read_tensor(source, out, part)
                return out
            wide = np.empty(out.shape, np.float32)  # subtracting loses digits in 16 bits
            self._file.read_tensor(source, wide, part)
            out[...] = wide - 1
            return out
        rows = shape[0] // heads
        if part[0].start % rows or part[0].stop % rows:  # the file has the rows of a head in another order
            out[...] = self.read_tensor(name)[part]
        else:
            self._file.read_tensor(source, _in_file_order(out, rows), part)
        return out

    def _is(self, name: str, stems: tuple[str, ...]) -> bool:
        return _generic(name.rpartition(".")[0]) in stems

    def _file_rows(self, count: int) -> np.ndarray:
        """Where in the file, which has queries, keys and values one after the other, each row of a checkpoint is.

        Raises:
            CheckpointError: it has another number of rows.
        """
        heads, kv_heads = self._count("attention.head_count"), self._kv_heads()
        head_dim = self._count("attention.key_length", self._count("embedding_length") // heads)
        if heads % kv_heads or count != (heads + 2 * kv_heads) * head_dim:
            raise CheckpointError(f"{self.path}: {count} rows of queries, keys and values are not those of {heads} and "
                                  f"{kv_heads} heads of {head_dim} numbers")
        parts = np.split(np.arange(count), [heads * head_dim, (heads + kv_heads) * head_dim])
        return np.concatenate([part.reshape(kv_heads, -1) for part in parts], axis=1).reshape(-1)

    def _kv_heads(self) -> int:
        return self._count("attention.head_count_kv", self._count("attention.head_count"))

    def read_packed(self, name: str, kind: PackedType, leaf: str, rows: np.ndarray, columns: slice,
                    out: np.ndarray) -> None:
        """See `Checkpoint.read_packed`."""
        source = self._sources[name]
        heads, count = self._permuted_heads(source), self.shape(name)[0]
        if heads is not None:
            in_file = _in_file_order(np.arange(count), count // heads).reshape(-1)
            rows = np.argsort(in_file)[rows]
        each = kind.shapes(GGUF_BLOCKS[kind.name], PANEL)[leaf].shape[1]  # of a block
        blocks = self._file.blocks(source)[:, columns.start // each : columns.stop // each]
        pack(blocks, kind.name, rows, {leaf: out})
        self._file.forget(source)

    def _hf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        layer = _LAYER.match(stem)
        if layer:
            stem = _generic(stem)
        mapped = self._stems.get(stem)
        if mapped is None:
            return name
        return f"{mapped.replace('{i}', layer[1]) if layer else mapped}.{kind}"

    def _permuted_heads(self, name: str) -> int | None:
        """The number of heads of a tensor whose rows the converter has reordered; None for any other."""
        stem = _generic(name.rpartition(".")[0])
        if stem not in self._family.permuted:
            return None
        heads: int = self.config["num_attention_heads" if stem.endswith("_q") else "num_key_value_heads"]
        rows = self._file.tensors[name].shape[0]
        if rows % (2 * heads):
            raise CheckpointError(f"{self.path}: {name} has {rows} rows, not a whole number of {heads} heads")
        return heads

    def _make_config(self) -> dict[str, Any]:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self.path} has no tensor token_embd.weight")
        heads, width = self._count("attention.head_count"), self._count("embedding_length")
        head_dim = self._count("attention.key_length", width // heads)
        if self._count("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError(f"{self.path}: keys and values of different length are not supported")
        rotated = self._count("rope.dimension_count", head_dim)
        if rotated != head_dim and not self._family.partial_rotary:
            raise UnsupportedModelError(f"{self.path}: rotary embedding of a part of each head is not supported")
        if self._metadata.get(f"{self._name}.expert_count"):
            raise UnsupportedModelError(f"{self.path}: mixture-of-experts GGUF files are not supported")
        for key, neutral in _NEUTRAL.items():
            value = self._metadata.get(f"{self._name}.{key}")
            if value is not None and value not in neutral and key not in self._family.keys:
                raise UnsupportedModelError(f"{self.path}: metadata {self._name}.{key} is {_brief(value)}, which "
                                            "changes what the model computes and is not supported")
        config: dict[str, Any] = {
            "architectures": [self._family.architecture],
            "model_type": self._family.model_type,
            "hidden_size": width,
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._kv_heads(),
            "head_dim": head_dim,
            "intermediate_size": self._count("feed_forward_length"),
            "vocab_size": embedding.shape[0],
            "max_position_embeddings": self._count("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", 1e-5),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": self._has("attn_q.bias"),
            "mlp_bias": self._has("ffn_gate.bias"),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "dtype": self._dtype(),
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._end_ids(),
        }
        config |= self._family.fixed | self._family.derived(config) | self._own_keys()
        if self._family.partial_rotary:
            # The next float, since a part is rounded down to whole numbers.
            config["partial_rotary_factor"] = min(1, math.nextafter(rotated / head_dim, 2))
        config["rope_scaling"] = self._rope_scaling(config["rope_theta"], rotated)
        if self._has("attn_norm_2.weight"):
            config["num_ln_in_parallel_attn"] = 2
        return config | {new: config[old] for old, new in self._family.renamed.items()}

    def _own_keys(self) -> dict[str, Any]:
        """What the family reads besides."""
        found = {name: self._metadata[f"{self._name}.{key}"] for key, name in self._family.keys.items()
                 if f"{self._name}.{key}" in self._metadata}
        if self._family.model_type == "cohere":
            found["use_qk_norm"] = self._has("attn_q_norm.weight")
        if self._family.model_type in _QKV_BIASES:
            found[_QKV_BIASES[self._family.model_type]] = self._has("attn_qkv.bias")
        if not found.get("sliding_window", 1):
            found["sliding_window"] = None
        pattern = found.get("sliding_window_pattern")
        if isinstance(pattern, list):  # of each layer, whether it has a window
            del found["sliding_window_pattern"]
            found["layer_types"] = ["sliding_attention" if item else "full_attention" for item in pattern]
        return found

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._file.tensors:
            return self._llama3_scaling(theta, head_dim)
        if _LONGROPE["long_factor"] in self._file.tensors:
            return self._longrope_scaling(head_dim)
        # A factor without a type means linear, as in llama.cpp.
        kind = self._metadata.get(f"{self._name}.rope.scaling.type", "linear")
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        if kind == "yarn" and factor != 1:
            return self._yarn_scaling(factor)
        magnitude = self._number("rope.scaling.attn_factor", 1.0)
        if magnitude != 1:
            raise UnsupportedModelError(f"{self.path}: metadata {self._name}.rope.scaling.attn_factor is {magnitude}, "
                                        "which is supported for YaRN only")
        return None if kind == "none" or factor == 1 else {"rope_type": kind, "factor": factor}

    def _yarn_scaling(self, factor: float) -> dict[str, Any]:
        """YaRN's numbers. Three make the factor on cosine and sine: the converted checkpoint's own, or the multiplier
        of the logarithm, which is DeepSeek's mscale_all_dim; and one that llama.cpp multiplies with either."""
        extrapolation = self._metadata.get(f"{self._name}.rope.scaling.yarn_ext_factor", 1.0)
        if extrapolation not in (1, -1):  # -1: not set
            raise UnsupportedModelError(f"{self.path}: metadata {self._name}.rope.scaling.yarn_ext_factor must be 1, "
                                        f"not {_brief(extrapolation)}")

        def magnitude(scale: float) -> float:
            return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

        multiplier = self._number("rope.scaling.yarn_log_multiplier", 0.0, least=0.0)
        own = self._number("rope.scaling.yarn_attn_factor", magnitude(1) / magnitude(multiplier))
        return {
            "rope_type": "yarn", "factor": factor,
            "original_max_position_embeddings": self._count("rope.scaling.original_context_length",
                                                            self._count("context_length")),
            "beta_fast": self._number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self._number("rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": own * self._number("rope.scaling.attn_factor", 1.0),
        }

    def _longrope_scaling(self, head_dim: int) -> dict[str, Any]:
        factors = {key: self._rotary_tensor(name, head_dim) for key, name in _LONGROPE.items()}
        return {
            "rope_type": "longrope", **{key: found.tolist() for key, found in factors.items()},
            "original_max_position_embeddings": self._count("rope.scaling.original_context_length"),
            "attention_factor": self._number("rope.scaling.attn_factor", 1.0),
        }

    def _rotary_tensor(self, name: str, head_dim: int) -> np.ndarray:
        """A number for each rotary pair."""
        if name not in self._file.tensors or self._file.tensors[name].shape != (head_dim // 2,):
            raise CheckpointError(f"{self.path}: {name} must have {head_dim // 2} elements")
        found = np.empty(head_dim // 2, np.float32)
        self._file.read_tensor(name, found)
        return found

    def _llama3_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        found = self._rotary_tensor(_ROPE_FACTORS, head_dim)
        factor = float(found.max())
        with np.errstate(all="ignore"):  # damaged numbers end as "not close"
            wave = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
            smooth = np.clip((_LLAMA3_CONTEXT / wave - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
            known = np.allclose(1 / found, (1 - smooth) / factor + smooth, rtol=1e-4)
        if not known:
            raise UnsupportedModelError(f"{self.path}: {_ROPE_FACTORS} is not the scaling of Llama 3.1 and later; "
                                        "other rotary factors are not supported")
        if factor == 1:
            return None
        return {"rope_type": "llama3", "factor": factor, "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH, "original_max_position_embeddings": _LLAMA3_CONTEXT}

    def _dtype(self) -> str:
        """The dtype that most weights are stored in; bfloat16, which cannot overflow, where they are quantized."""
        sizes: dict[str, int] = {}
        for tensor in self._file.tensors.values():
            sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.nbytes
        return _DTYPES.get(max(sizes, key=lambda kind: sizes[kind]), "bfloat16")

    def _end_ids(self) -> list[int]:
        found = (self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return sorted({item for item in found if isinstance(item, int)})

    def _has(self, suffix: str) -> bool:
        return any(name.endswith(f".{suffix}") for name in self._file.tensors)

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._metadata.get(f"{self._name}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path}: metadata {self._name}.{key} must be a positive integer, "
                                  f"not {_brief(value)}")
        return value

    def _number(self, key: str, default: float, least: float | None = None) -> float:
        """A positive number, or one of at least `least`."""
        value = self._metadata.get(f"{self._name}.{key}", default)
        if not isinstance(value, (int, float)) or not math.isfinite(value) or (value <= 0 and value != least):
            raise CheckpointError(f"{self.path}: metadata {self._name}.{key} must be a positive number, "
                                  f"not {_brief(value)}")
        return float(value)


def _in_file_order(out: np.ndarray, rows: int) -> np.ndarray:
    """A view of whole heads of `rows` rows each, in the file's order.

    Rotary pairs are (j, j + H/2) in Hugging Face's layout and neighbors in GGUF's.
    """
    view = out.reshape(-1, 2, rows // 2, *out.shape[1:]).swapaxes(1, 2)
    assert np.may_share_memory(view, out) or not out.size, (out.shape, out.strides)
    return view


def _generic(stem: str) -> str:
    return _LAYER.sub("blk.{i}.", stem, count=1)


def _brief(value: object) -> str:
    return "missing" if value is None else "a list" if isinstance(value, list) else repr(value)[:64]
