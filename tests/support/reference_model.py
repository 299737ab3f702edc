"""Hugging Face transformers in float32 on the CPU: the independent reference for everything the engine generates."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy ids, and the gap between the two best logits at each position."""

    ids: tuple[int, ...]
    gaps: tuple[float, ...]


class ReferenceModel:
    """A checkpoint as transformers loads it, dequantized to float32.

    Args:
        path: a .gguf file, or a directory in Hugging Face layout.
    """

    def __init__(self, path: Path) -> None:
        disable_progress_bar()
        if path.suffix == ".gguf":
            self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.eval()
        self.model.generation_config.eos_token_id = None

    def check(self, prompt: Sequence[int], ids: Sequence[int]) -> Greedy:
        """The greedy choice at each position of `ids` given `prompt` and the ids before it, in one pass.

        As long as `ids` agree with the result they are the reference's own greedy continuation; at the first position
        where they do not, the two part. That is all that `compare_ids` looks at, at a fraction of the cost of `greedy`.
        """
        assert prompt and ids, "needs a prompt and at least one id"
        tokens = torch.tensor([[*prompt, *ids[:-1]]])
        with torch.inference_mode():
            logits = self.model(tokens, logits_to_keep=len(ids), use_cache=False).logits[0]
        return _choose(logits)

    def greedy(self, prompt: Sequence[int], length: int) -> Greedy:
        """Generate `length` ids, end tokens ignored."""
        tokens = torch.tensor([list(prompt)])
        out = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=length,
                                  do_sample=False, return_dict_in_generate=True, output_logits=True)
        return _choose(torch.cat(out.logits))


def _choose(logits: torch.Tensor) -> Greedy:
    best, ids = logits.float().topk(2, dim=-1)
    return Greedy(tuple(ids[:, 0].tolist()), tuple((best[:, 0] - best[:, 1]).tolist()))
