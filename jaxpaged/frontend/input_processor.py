"""Prompts, chats and sampling parameters in; checked requests for the engine out."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

from jaxpaged.core.errors import NotSupportedError, RequestError
from jaxpaged.core.limits import LIMITS, Limits, check_at_most
from jaxpaged.core.messages import EngineRequest, Grammar
from jaxpaged.core.reasoning import ReasoningFormat, ReasoningStart
from jaxpaged.core.sampling_params import (
    MAX_BEAM_CANDIDATES,
    SamplingParams,
    StructuredOutputsParams,
    num_beam_candidates,
)
from jaxpaged.core.tool_formats import PLAIN_CALLS, ToolCallFormat
from jaxpaged.frontend.answer_forms import AnswerForms, OwnCalls
from jaxpaged.frontend.context_window import ContextWindow
from jaxpaged.frontend.output_processor import sequence_ids
from jaxpaged.text.conversation import normalize_messages
from jaxpaged.text.structured_outputs import GrammarCompiler
from jaxpaged.text.template_traits import content_text
from jaxpaged.text.tokenizer import Tokenizer

MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a rendered conversation.

    Attributes:
        reasoning: where the answer begins; None for a model that does not reason.
    """

    text: str
    token_ids: list[int]
    reasoning: ReasoningStart | None = None


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """A request ready to run.

    Attributes:
        prompt: the prompt's text; None where only ids were given.
        reasoning: where the answer begins, for a chat with a model that reasons.
        max_tokens: the resolved limit of each choice.
        sequences: the engine's requests, one per choice.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    arrival_time: float
    sequences: tuple[EngineRequest, ...]
    reasoning: ReasoningStart | None = None


class InputProcessor:
    """Checks requests against one model's limits. May be called from several threads at once.

    Args:
        tokenizer: None where prompts come as ids only.
        max_model_len: maximum number of tokens of prompt and output together.
        vocab_size: number of ids that the model knows.
        max_n: maximum n and best_of of a request.
        max_logprobs: maximum number of alternatives per position that a request may ask for.
        eos_token_ids: ids that end a text: those of the tokenizer, the model's and the generation config together.
        default_params: sampling parameters of requests without any, as `default_sampling_params` makes them.
        takes_priorities: whether the scheduling policy uses priorities; if not, any but 0 is refused.
        limits: what else a request may hold.
        reasoning: how the model marks its reasoning; None for one that does not reason.
        tool_calls: how it writes tool calls, for chat templates that do not show them.
        make_grammar: compiles structured outputs; None to do it in this process.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, max_model_len: int, vocab_size: int,
                 max_n: int = 128, max_logprobs: int = 20, eos_token_ids: Iterable[int] = (),
                 default_params: Mapping[str, Any] | None = None, takes_priorities: bool = False,
                 limits: Limits = LIMITS, reasoning: ReasoningFormat | None = None,
                 tool_calls: ToolCallFormat = PLAIN_CALLS,
                 make_grammar: Callable[[StructuredOutputsParams], Grammar] | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_n, self._max_logprobs = max_n, min(max_logprobs, vocab_size)
        self._limits = limits
        self._forms = AnswerForms(tokenizer, reasoning, make_grammar or GrammarCompiler(limits).grammar)
        self._eos = frozenset(eos_token_ids)
        self._default = SamplingParams(**(default_params or {}))
        self._takes_priorities = takes_priorities
        self._reasoning, self._tool_calls = reasoning, tool_calls
        self._context = ContextWindow(max_model_len, tokenizer.max_token_chars if tokenizer is not None else None)

    @property
    def max_n(self) -> int:
        """Largest n and best_of of a request."""
        return self._max_n

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model knows."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text."""
        return self._eos

    @property
    def reasons(self) -> bool:
        """Whether the answers of chats may hold reasoning."""
        return self._reasoning is not None

    @cached_property
    def marks_are_special(self) -> bool:
        """Whether the marks around the reasoning are special tokens, which the text hides unless asked otherwise."""
        marks = (self._reasoning.begin, self._reasoning.end) if self._reasoning and self._tokenizer else ()
        return any(self._tokenizer.special_id(mark) is not None for mark in marks if self._tokenizer)

    def process(self, request_id: str, prompt: object, params: SamplingParams | None = None, *,
                add_special_tokens: bool = True, lower_max_tokens: bool = False, arrival_time: float | None = None,
                priority: int = 0, cache_salt: str | None = None,
                truncate_prompt_tokens: int | None = None, calls: OwnCalls | None = None,
                max_output: int | None = None) -> ProcessedRequest:
        """Turn one prompt into requests for the engine.

        Args:
            prompt: text, a list of ids, {"prompt": text} or {"prompt_token_ids": ids}; with both keys the ids are
                used and the text is only returned. A third key, "cache_salt", is the argument of that name. Or what
                `render_chat` returns.
            params: None for the model's defaults.
            add_special_tokens: let the tokenizer add its special tokens, such as a BOS token.
            lower_max_tokens: lower a max_tokens that does not fit, because it is only a default.
            arrival_time: seconds of `time.monotonic()`; None for the present.
            priority: the smaller is served first.
            cache_salt: prefixes are shared only with requests of the same salt.
            truncate_prompt_tokens: keep only that many tokens, the last ones; -1 for as many as the context holds.
            calls: what the output may consist of in place of its structured output.
            max_output: a bound for a max_tokens that is not given.

        Raises:
            RequestError: the prompt or a parameter cannot be used; `param` names the field.
            ContextLengthError: prompt and max_tokens do not fit the context.
        """
        if params is None:
            params, lower_max_tokens = self._default, True
        self._limits.check_params(params)
        self._check_maxima(params)
        self._check_priority(priority)
        if isinstance(prompt, Mapping) and cache_salt is None:
            cache_salt = prompt.get("cache_salt")
        self._check_cache_salt(cache_salt)
        reasoning = prompt.reasoning if isinstance(prompt, ChatPrompt) else None
        min_output = 0 if params.max_tokens == 0 else 1
        keep = self._context.resolve_truncation(truncate_prompt_tokens, min_output)
        text, ids = self._prompt(prompt, add_special_tokens)
        if keep is not None and len(ids) > keep:
            ids = ids[-keep:]
            text = self._tokenizer.decode(ids, skip_special_tokens=False) if self._tokenizer else None
        self._context.check_prompt(len(ids), "prompt", min_output)
        max_tokens = self._context.resolve_max_tokens(len(ids), params.max_tokens, lower=lower_max_tokens)
        if params.max_tokens is None and max_output is not None:
            max_tokens = min(max_tokens, max_output)
        eos = frozenset() if params.ignore_eos else self._eos
        stop_token_ids = eos.union(params.stop_token_ids or ())
        bad_word_ids = self._bad_word_ids(params.bad_words or ())
        self._check_token_ids(params)
        grammar = None
        if params.structured_outputs is not None:
            reasoning = self._forms.start_of_form(reasoning)
            grammar = self._forms.answer_grammar(params.structured_outputs, reasoning, text, ids, calls)
        if params.min_tokens > max_tokens:
            raise RequestError(f"min_tokens must not exceed the {max_tokens} tokens that fit", param="min_tokens")
        if params.use_beam_search:
            _check_beams(params, len(stop_token_ids))
        seed = None if params.seed is None else params.seed % 2**64
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        ids_of_choices = sequence_ids(request_id, params.num_sequences)
        engine_params = params.for_engine()
        sequences = tuple(
            EngineRequest(sequence_id, ids, engine_params, max_tokens, stop_token_ids, eos, bad_word_ids, seed, choice,
                          arrival_time, priority, cache_salt, fork_of=ids_of_choices[0] if choice else None,
                          skip_prefix_read=params.prompt_logprobs is not None, grammar=grammar)
            for choice, sequence_id in enumerate(ids_of_choices))
        return ProcessedRequest(request_id, text, ids, params, max_tokens, arrival_time, sequences, reasoning)

    def render_chat(self, messages: object, *, tools: list[dict[str, Any]] | None = None,
                    add_generation_prompt: bool = True, continue_final_message: bool = False,
                    chat_template_kwargs: dict[str, Any] | None = None, add_special_tokens: bool = False,
                    may_be_long: bool = False) -> ChatPrompt:
        """Turn a conversation into a prompt for `process`.

        Args:
            tools: that the model may call, in OpenAI's form.
            add_special_tokens: add the tokenizer's special tokens, where the template has not written them.
            may_be_long: allow one that exceeds the context, for counting its tokens.

        Raises:
            RequestError: bad messages, or a template that refuses them.
            ContextLengthError: more text than the context can hold.
        """
        if isinstance(messages, Sequence):
            check_at_most("messages", "messages", len(messages), self._limits.max_messages)
        normal = normalize_messages(messages)
        tokenizer = self._needed_tokenizer("messages")
        self._context.check_text(sum(len(content_text(message["content"])) for message in normal), "messages")
        rendered, ids = tokenizer.encode_chat(
            normal, tools=tools or None, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, chat_template_kwargs=chat_template_kwargs,
            add_special_tokens=add_special_tokens, wants_turn=self.reasons, calls=self._tool_calls,
            check=lambda text: self._context.check_text(len(text), "messages"))
        if not may_be_long:
            self._context.check_prompt(len(ids), "messages")
        words = content_text(normal[-1]["content"]) if continue_final_message else ""
        start = self._reasoning.start_of_answer(rendered.turn, words=words) if self._reasoning else None
        return ChatPrompt(rendered.text, ids, start)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text. They may exceed the context, unless the number of characters alone does.

        Raises:
            RequestError: text that cannot be tokenized.
        """
        self._context.check_text(len(text), "prompt")
        return self._needed_tokenizer("prompt").encode(text, add_special_tokens)

    def _prompt(self, prompt: object, add_special_tokens: bool) -> tuple[str | None, tuple[int, ...]]:
        text: object = None
        ids: object = None
        if isinstance(prompt, ChatPrompt):
            text, ids = prompt.text, prompt.token_ids
        elif isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            unknown = next((key for key in prompt if key not in ("prompt", "prompt_token_ids", "cache_salt")), None)
            if unknown is not None:
                raise NotSupportedError("a prompt holds prompt or prompt_token_ids, cache_salt, and nothing else",
                                        param="prompt")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif prompt is not None:
            ids = prompt
        if text is not None and not isinstance(text, str):
            raise RequestError("prompt must be text", param="prompt")
        if ids is not None:
            return text, self._check_ids(ids)
        if not text:
            raise RequestError("prompt is empty; give a text or a list of token ids", param="prompt")
        encoded = tuple(self.encode(text, add_special_tokens))
        if not encoded:
            raise RequestError("prompt has no token", param="prompt")
        if max(encoded) >= self._vocab_size:
            raise RequestError("prompt has a token that the model does not know", param="prompt")
        return text, encoded

    def _check_maxima(self, params: SamplingParams) -> None:
        for name, maximum, flag in (("n", self._max_n, "--max-n"), ("best_of", self._max_n, "--max-n"),
                                    ("logprobs", self._max_logprobs, "--max-logprobs"),
                                    ("prompt_logprobs", self._max_logprobs, "--max-logprobs")):
            if (getattr(params, name) or 0) > maximum:
                raise RequestError(f"{name} must be at most {maximum} ({flag})", param=name)

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name in ("logit_bias", "allowed_token_ids"):
            ids = getattr(params, name)
            if ids and max(ids) >= self._vocab_size:
                raise RequestError(f"token ids in {name} must be below {self._vocab_size}", param=name)

    def grammar(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar of structured outputs, known to compile; see `AnswerForms.grammar`."""
        return self._forms.grammar(wanted)

    def _bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word, at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            tokenizer = self._needed_tokenizer("bad_words")
            for text in (word, " " + word.lstrip()):
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
                check_at_most("bad_words", "tokens in a text", len(ids), self._limits.max_bad_word_tokens)
                if ids:
                    found[ids] = None
        return tuple(found)

    def _check_ids(self, ids: object) -> tuple[int, ...]:
        if hasattr(ids, "tolist"):  # an array of numpy or JAX
            ids = ids.tolist()
        if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Sequence):
            raise RequestError("prompt must be a text or a list of token ids", param="prompt")
        if not ids:
            raise RequestError("prompt is empty; give at least one token id", param="prompt")
        if set(map(type, ids)) != {int}:  # not isinstance: True is an int
            if not all(isinstance(item, Integral) and not isinstance(item, bool) for item in ids):
                raise RequestError("token ids must all be integers", param="prompt")
            ids = list(map(int, ids))  # of numpy
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise RequestError(f"token ids must be from 0 to {self._vocab_size - 1}", param="prompt")
        return tuple(ids)

    def _check_priority(self, priority: object) -> None:
        if type(priority) is not int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise RequestError(f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}", param="priority")
        if priority and not self._takes_priorities:
            raise RequestError("priority needs an engine that was started with --scheduling-policy priority; leave it "
                               "out", param="priority")

    def _check_cache_salt(self, salt: object) -> None:
        if salt is None:
            return
        if not isinstance(salt, str) or not salt:
            raise RequestError("cache_salt must be a text that is not empty", param="cache_salt")
        check_at_most("cache_salt", "characters", len(salt), self._limits.max_cache_salt_chars)

    def _needed_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("there is no tokenizer; give token ids", param=param)
        return self._tokenizer


def _check_beams(params: SamplingParams, num_end_ids: int) -> None:
    if params.has_processors or params.structured_outputs is not None or params.prompt_logprobs is not None:
        raise RequestError("use_beam_search cannot be combined with penalties, biases, min_tokens, word lists, "
                           "structured_outputs or prompt_logprobs; leave these out", param="use_beam_search")
    width = params.best_of or params.n
    if num_beam_candidates(width, num_end_ids) > MAX_BEAM_CANDIDATES:
        max_beams = MAX_BEAM_CANDIDATES // num_beam_candidates(1, num_end_ids)
        raise RequestError(f"a beam search has at most {max_beams} beams here",
                           param="best_of" if params.best_of else "n")
