"""What answers have to match: structured outputs as grammars, begun where the reasoning ends."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxpaged.core.errors import NotSupportedError, RequestError
from jaxpaged.core.messages import Grammar
from jaxpaged.core.reasoning import ReasoningFormat, ReasoningStart
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.core.tool_formats import ToolCallFormat
from jaxpaged.text.answer_grammar import CallGrammar, answer_grammar
from jaxpaged.text.bounded_cache import BoundedCache
from jaxpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_GRAMMARS = 256  # in the cache
MAX_GRAMMARS_BYTES = 2**24  # of their texts


@dataclass(frozen=True, slots=True)
class OwnCalls:
    """Calls that an answer may consist of, in place of its structured output.

    Attributes:
        call: structured output of the JSON object of one.
        format: how the model writes them.
        one: there is only one.
    """

    call: StructuredOutputsParams
    format: ToolCallFormat
    one: bool = False


class AnswerForms:
    """Makes the grammars of answers. May be used by several threads at once.

    Args:
        tokenizer: None where prompts come as ids only; there are no grammars then.
        reasoning: how the model marks its reasoning; None for one that does not reason.
        make_grammar: compiles structured outputs.
    """

    def __init__(self, tokenizer: Tokenizer | None, reasoning: ReasoningFormat | None,
                 make_grammar: Callable[[StructuredOutputsParams], Grammar]) -> None:
        self._tokenizer, self._reasoning, self._make_grammar = tokenizer, reasoning, make_grammar
        self._grammars: BoundedCache[bytes, Grammar] = BoundedCache(MAX_GRAMMARS, MAX_GRAMMARS_BYTES)
        self._dropped: set[str] = set()

    def grammar(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar of structured outputs, known to compile.

        What has been checked is remembered: a check costs 0.6 ms to 140 ms by the size, in a server in a process that
        can be killed. Repeated for each request it takes a sixth more CPU with a small schema, and three times the
        latency with 50 tools (a tiny model, 16 clients). The compiled form, which cannot leave the engine's process
        and costs 0.4 ms to 250 ms per choice, is cached there.

        Raises:
            RequestError: it cannot be compiled, or not with this tokenizer.
        """
        if self._needed_tokenizer().byte_rule is None:
            raise NotSupportedError("structured_outputs is not supported with this tokenizer",
                                    param="structured_outputs")
        try:
            key = hashlib.sha256(repr(wanted).encode(errors="surrogatepass")).digest()
        except RecursionError:
            raise RequestError("the JSON schema is nested too deeply", param="structured_outputs") from None
        grammar = self._grammars.get(key)
        if grammar is None:
            grammar = self._make_grammar(wanted)
            for keyword in grammar.dropped:
                if keyword not in self._dropped:
                    self._dropped.add(keyword)
                    logger.warning("ignoring %s in the JSON schema of a tool that is not strict: it cannot be enforced",
                                   keyword)
            self._grammars.put(key, grammar, len(grammar.text))
        return grammar

    def start_of_form(self, start: ReasoningStart | None) -> ReasoningStart | None:
        """Where an answer begins that has a form: a model that knows no marks does not reason of itself."""
        if start is None or start.opened or self._knows_marks:
            return start
        return replace(start, phase="before" if start.phase == "inside" else start.phase)

    def answer_grammar(self, wanted: StructuredOutputsParams, reasoning: ReasoningStart | None, text: str | None,
                       ids: Sequence[int], calls: OwnCalls | None) -> Grammar:
        """What the output has to match: structured output or calls, behind the reasoning.

        Args:
            reasoning: where the answer of a chat begins; None for a prompt without turns.
            text, ids: of the prompt.
            calls: what the output may consist of in place of its structured output.
        """
        form = self.grammar(wanted)
        tokenizer = self._needed_tokenizer()
        if reasoning is None and self._reasoning is not None:
            text = tokenizer.decode(ids, skip_special_tokens=False) if text is None else text
            reasoning = self._reasoning.start_of_text(text)
        elif reasoning is not None and not (reasoning.opened or self._knows_marks):
            reasoning = None
        own = None if calls is None else CallGrammar(self.grammar(calls.call), calls.format, calls.one)
        return answer_grammar(form, reasoning, tokenizer, space=wanted.is_json, calls=own)

    @cached_property
    def _knows_marks(self) -> bool:
        assert self._reasoning is not None
        return self._needed_tokenizer().knows_mark(self._reasoning.begin)

    def _needed_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("there is no tokenizer; give token ids", param="structured_outputs")
        return self._tokenizer
