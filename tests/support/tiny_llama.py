"""A tiny Llama with random weights: on disk, in memory, and in float64 NumPy as the reference.

Its greedy choices are mostly clear, so that comparisons go far before the first near-tie.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.weights import load_params
from jaxpaged.models.registry import find_family
from jaxpaged.models.transformer import Transformer
from tests.support import tiny_gguf
from tests.support.live_server import write_tiny_model
from tests.support.model_configs import with_windows
from tests.support.sameness import compare_ids

CONTEXT, VOCAB, EOS = 128, 257, 256
CONFIG = {**tiny_gguf.CONFIG, "vocab_size": VOCAB, "eos_token_id": EOS, "max_position_embeddings": CONTEXT}

BIASED = ("q_proj", "k_proj", "v_proj")

# Few and small programs, compiled as far as a test uses them. Engines of the same sizes find them in the cache that all
# tests share.
ENGINE_ARGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 33,
                               "enforce_eager": True}
# For tests of what compiles when: everything at the start, as by default.
COMPILED_ARGS: dict[str, Any] = ENGINE_ARGS | {"enforce_eager": False}


def random_weights(config: dict[str, Any] = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights under Hugging Face names; those of Qwen2 have biases."""
    weights = tiny_gguf.random_weights(config, seed)
    if config.get("model_type") == "qwen2":
        rng = np.random.default_rng(seed)
        weights |= {name.replace("weight", "bias"): rng.standard_normal(len(tensor), np.float32) / 4
                    for name, tensor in weights.items() if name.rpartition(".self_attn.")[2][:6] in BIASED}
    for name, tensor in weights.items():
        if "norm" in name:
            tensor += 1
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensor *= 4
    return weights


def write_model(folder: Path, config: dict[str, Any] = CONFIG, seed: int = 0) -> Path:
    """Write a model whose tokens are single bytes, id 256 apart, which ends a text."""
    write_tiny_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config, seed), folder / "model.safetensors")
    return folder


def module_and_params(config: dict[str, Any] = CONFIG, seed: int = 0) -> tuple[Transformer, dict[Any, Any]]:
    """A model in memory; its params are ours to change."""
    family = find_family(config)
    module = family.build(family.config_from_hf(config), jnp.float32, seed)
    return module, jax.tree.map(lambda leaf: leaf, nnx.to_pure_dict(nnx.state(module)))


def load_with_windows(folder: Path, windows: Sequence[int | None]) -> tuple[Transformer, dict[Any, Any]]:
    """A checkpoint's module and float32 weights, with the sliding window of each layer, as no config of Llama has."""
    checkpoint = open_checkpoint(folder)
    family = find_family(checkpoint.config)
    config = with_windows(family.config_from_hf(checkpoint.config), tuple(windows))
    module = family.build(config, jnp.dtype(jnp.float32))
    return module, load_params(nnx.to_pure_dict(nnx.state(module)), family.weights, checkpoint, config=config)


@dataclass(frozen=True)
class Reference:
    """The model in float64, one token after another."""

    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    stored: Callable[[np.ndarray], np.ndarray] = np.asarray  # what comes back of keys and values [T, K, H]
    windows: Sequence[int | None] = ()  # of each layer; none has one if empty

    def logits(self, tokens: Sequence[int], last: int | None = None) -> np.ndarray:
        """[T, V]: after each token, or the `last` ones, what may follow; what those do not need is not computed."""
        config, count = self.config, len(tokens)
        layers = range(config["num_hidden_layers"])
        heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        windows = self.windows or [None] * len(layers)
        starts = [count - (last or count)]  # the first row that each layer needs, and that the head needs
        for window in reversed(windows):
            starts.insert(0, 0 if window is None else max(0, starts[0] - window + 1))
        x = self._weight("model.embed_tokens")[list(tokens[starts[0] :])]
        for layer, window, begin, out in zip(layers, windows, starts, starts[1:], strict=False):
            name = f"model.layers.{layer}."
            angle = np.arange(begin, count)[:, None] * config["rope_theta"] ** (-np.arange(0, size, 2) / size)
            turn = np.exp(1j * angle)[:, None]
            y = self._norm(x, name + "input_layernorm")
            q, k, v = (self._product(y, f"{name}self_attn.{part}_proj").reshape(count - begin, -1, size)
                       for part in "qkv")
            q, k = _rotate(q, turn)[out - begin :], _rotate(k, turn)
            k, v = (np.repeat(self.stored(part), heads // kv_heads, axis=1) for part in (k, v))
            x = x[out - begin :]
            mixed = np.concatenate([_attend(q[first : first + _ROWS], k, v, out - begin + first, window)
                                    for first in range(0, count - out, _ROWS)])
            x = x + mixed @ self._weight(name + "self_attn.o_proj").T
            y = self._norm(x, name + "post_attention_layernorm")
            gate, up = (y @ self._weight(f"{name}mlp.{part}_proj").T for part in ("gate", "up"))
            x = x + gate / (1 + np.exp(-gate)) * up @ self._weight(name + "mlp.down_proj").T
        head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
        return self._norm(x, "model.norm") @ self._weight(head).T

    def error(self, prompt: Sequence[int], ids: Sequence[int], length: int | None = None) -> str | None:
        """None where `ids` are the greedy continuation, by the rule of sameness; else what is wrong.

        Args:
            length: the expected number of them, if generation has ended.
        """
        logits = self.logits([*prompt, *ids], len(ids) + 1)[: length or len(ids)]
        best = np.sort(logits, axis=-1)
        return compare_ids(ids, logits.argmax(axis=-1).tolist(), (best[:, -1] - best[:, -2]).tolist())

    def _weight(self, name: str) -> np.ndarray:
        return self.weights[f"{name}.weight"].astype(np.float64)

    def _product(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._weight(name).T + self.weights.get(f"{name}.bias", 0)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self._weight(name)


_ROWS = 256  # of queries at a time, which bounds the memory


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, window: int | None) -> np.ndarray:
    """[T, N * H]: T queries [T, N, H], of which the first is that of key `first`, over keys and values [S, N, H]."""
    distance = np.arange(first, first + len(q))[:, None] - np.arange(len(k))
    seen = (distance >= 0) & (distance < (window or len(k)))
    scores = np.where(seen, np.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("nqk,knh->qnh", weights, v).reshape(len(q), -1))


def _rotate(x: np.ndarray, turn: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def random_prompt(length: int, seed: int) -> list[int]:
    """Ids of plain tokens."""
    return np.random.default_rng(seed).integers(0, EOS, length).tolist()
