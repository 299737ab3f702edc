"""Which tokens of a GGUF file end a text, besides those that it names: by their texts, and by the chat template.

Files name one end, rarely two. llama.cpp knows the others by their texts, and so does this list.
"""

import re
from collections.abc import Mapping

_ENDS = frozenset((
    "</s>", "<eos>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>",
    "<|flush|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>",
    "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<\uff5cend▁of▁sentence\uff5c>", "[e~["))
# Ends of a file, or of the place to fill in, in code models.
_CODE_ENDS = frozenset(("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|repo_name|>", "<|fim_repo|>", "<fim-repo>",
                        "<reponame>", "<|file_sep|>"))
# Tokens that, all there, make of the other no end but a mark inside an answer.
_INSIDE = ((("<|return|>", "<|call|>"), "<|end|>"), (("<|calls|>", "<|flush|>"), "<|end|>"),
           (("<|tool_response>",), "</s>"))
# A message's content, filters and the like, then text or the end of the expression.
_AFTER_CONTENT = r"content['\"\]\)\s|a-z_.]*(?:-?\}\}|[+~]\s*['\"])(?:\\n|\s)*(?:\{\{-?\s*['\"])?"


def end_tokens(ids: Mapping[str, int], control: frozenset[str], template: str | None) -> frozenset[int]:
    """Ids of the tokens that end a text.

    Args:
        ids: of every token.
        control: the tokens that the file marks so.
        template: the chat template; a control token that it writes after a message's content ends a turn.
    """
    found = {text for text in _ENDS | _CODE_ENDS if text in ids}
    for marks, inside in _INSIDE:
        if found.issuperset(marks):
            found.discard(inside)
    if template:
        found |= {text for text in control if text in template
                  and re.search(_AFTER_CONTENT + re.escape(text), template)}
    return frozenset(ids[text] for text in found)
