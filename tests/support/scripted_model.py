"""A model that says what a test wants: its weights make each token lead to exactly one other.

A prompt that ends with the token of a script is answered with that script's pieces, one token each.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.live_server import write_tiny_model
from tests.support.tiny_gguf import CONFIG, random_weights

END = "<|end|>"
TEMPLATE = ("{% if tools %}{% for tool in tools %}[tool]{{ tool.function.name }}{% endfor %}{% endif %}"
            "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
            "{% if message.reasoning_content %}(thought: {{ message.reasoning_content }}){% endif %}"
            "{% for call in message.tool_calls or [] %}[call]{{ call.function.name }}"
            "{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{{ opening or '' }}{% SCRIPTS %}{% endif %}")


def write_scripted_model(folder: Path, scripts: Mapping[str, Sequence[str]], *, endless: Sequence[str] = (),
                         context: int = 2048) -> Path:
    """A model in Hugging Face layout.

    What it answers is chosen with `chat_template_kwargs: {"script": NAME}`, or by a last message that is the name. A
    variable `opening` is the text that the answer's turn starts with.

    Args:
        scripts: name -> texts of the tokens that the model writes, all of them different, ASCII alone.
        endless: names of scripts whose last token follows on itself.
    """
    folder.mkdir()
    pieces = [piece for script in scripts.values() for piece in script]
    assert len(set(pieces)) == len(pieces) and all(piece.isascii() for piece in pieces)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True),
                                *(AddedToken(_start(name), special=True) for name in scripts)])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    backend.save(str(folder / "tokenizer.json"))
    choice = "".join(f"{{% if (script or messages[-1].content) == '{name}' %}}{_start(name)}{{% endif %}}"
                     for name in scripts)
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END,
        "chat_template": TEMPLATE.replace("{% SCRIPTS %}", choice)}))
    numbers = backend.get_vocab()
    end = numbers[END]
    config = {**CONFIG, "vocab_size": len(numbers), "max_position_embeddings": context, "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config))
    chains = []
    for name, script in scripts.items():
        chain = [numbers[_start(name)], *(numbers[piece] for piece in script)]
        chains.append([*chain, chain[-1] if name in endless else end])
    save_file(_weights(config, end, chains), folder / "model.safetensors")
    return folder


def _start(name: str) -> str:
    return f"<|{name}|>"


def _weights(config: dict[str, Any], end: int, chains: list[list[int]]) -> dict[str, np.ndarray]:
    """No layer adds anything; a token's embedding is a state of its own, and each state has one successor."""
    weights = random_weights(config)
    for name, tensor in weights.items():
        if "norm" in name:
            tensor[:] = 1
        elif "o_proj" in name or "down_proj" in name or "embed" in name or "lm_head" in name:
            tensor[:] = 0
    embed, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embed[:, 0] = 1  # whatever belongs to no script ends the text
    head[end, 0] = 4
    state = 0
    for chain in chains:
        for number, follower in itertools.pairwise(chain):
            state += 1
            embed[number, 0], embed[number, state], head[follower, state] = 0, 1, 4
    return weights


def write_counting_model(folder: Path) -> Path:
    """A model that counts: after byte b it writes byte b + 1, after 255 byte 0, forever."""
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    weights = random_weights(config)
    for name, tensor in weights.items():
        if "norm" in name:
            tensor[:] = 1
        elif "o_proj" in name or "down_proj" in name:
            tensor[:] = 0
    states = np.random.default_rng(0).standard_normal((257, config["hidden_size"]), np.float32)
    states /= np.linalg.norm(states, axis=1, keepdims=True)
    weights["model.embed_tokens.weight"] = states
    weights["lm_head.weight"] = np.zeros_like(states)
    weights["lm_head.weight"][[(byte + 1) % 256 for byte in range(256)]] = 4 * states[:256]
    save_file(weights, folder / "model.safetensors")
    return folder
