"""Chat templates: Jinja in an immutable sandbox, as transformers renders them.

Needs Jinja alone, so that the server can render in a small process of its own, which can be cut off.
"""

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from itertools import takewhile
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxpaged.core.errors import RequestError
from jaxpaged.core.tool_formats import PLAIN_CALLS, ToolCallFormat
from jaxpaged.text.template_messages import MarkedChat, adapt
from jaxpaged.text.template_traits import ContentFormat, TemplateTraits, content_text, find_traits

# Names that the server passes to a template, or that transformers reserves; a request must not set them.
RESERVED = frozenset({"messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
                      "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
                      "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs", "self"})
_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "
_MAX_REASON_CHARS = 200
_MAX_FORMS = 256
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates


@dataclass(frozen=True, slots=True)
class TemplateJob:
    """The input of one rendering: plain JSON values throughout.

    Attributes:
        messages: normalized messages.
        tools: in OpenAI's form; None for none.
        variables: further variables of the template.
        wants_turn: tell what of the text belongs to the turn of the answer.
        traits: of each of the templates: messages are brought into the form that it reads, and one that leaves out
            something is an error. None to render them as they are, whatever becomes of them.
        calls: how the model writes tool calls, for a template that does not show them.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    wants_turn: bool = False
    traits: Mapping[str, TemplateTraits] | None = None
    calls: ToolCallFormat = PLAIN_CALLS


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation.

    Attributes:
        text: of the prompt.
        turn: the part of it that belongs to the turn of the answer: its header, and a message that is continued. Empty
            unless the job wants it.
    """

    text: str
    turn: str = ""


Renderer = Callable[[TemplateJob], RenderedChat]


class ChatTemplate:
    """One model's template. May be called from several threads at once.

    Args:
        source: Jinja, or several templates by name: with tools `tool_use` is taken where there is one, else `default`.
        special_tokens: variables of the template such as bos_token.
        content_format: whether the template reads content as a string or as a list of parts; auto to find out.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, Any],
                 content_format: ContentFormat = "auto") -> None:
        self._sources = dict(source) if isinstance(source, Mapping) else {"default": source}
        self._special_tokens = {name: str(token) for name, token in special_tokens.items() if isinstance(token, str)}
        self._environment = _environment()
        self._compiled: dict[str, Template] = {}
        self._content_format = content_format
        self._shown_forms: set[str] = set()  # forms of conversations of which the template shows everything

    @property
    def parts(self) -> tuple[dict[str, str], dict[str, str], ContentFormat]:
        """The arguments that make the same template in another process."""
        return self._sources, self._special_tokens, self._content_format

    @cached_property
    def traits(self) -> dict[str, TemplateTraits]:
        """What the templates read and show, found by rendering a few messages."""
        return {name: find_traits(partial(self._probe, name), self._content_format)
                for name in (DEFAULT, TOOL_USE) if name in self._sources}

    def _probe(self, name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
        try:
            return self._render(name, TemplateJob(messages, tools))
        except Exception:  # templates are code
            return None

    def render(self, job: TemplateJob) -> RenderedChat:
        """The text of the prompt, and of the answer's turn in it.

        Raises:
            RequestError: the template refuses these messages, fails on them, or leaves out a part of them.
        """
        name = TOOL_USE if job.tools and TOOL_USE in self._sources else DEFAULT
        if job.traits is not None and name in job.traits:
            messages, tools = adapt(job.messages, job.tools, job.traits[name], job.calls)
            job = replace(job, messages=messages, tools=tools)
        try:
            text = self._render(name, job)
            start = _num_common(text, self._earlier_turns(name, job, text)) if job.wants_turn else len(text)
        except TemplateError as error:
            reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
            raise RequestError(f"the chat template refuses these messages: {reason}", param="messages") from error
        except Exception as error:
            # Templates are code: a failure is the messages' fault or theirs, never the server's.
            raise RequestError(f"the chat template cannot render these messages ({type(error).__name__})",
                               param="messages") from error
        if job.traits is not None:
            self._check_shown(name, job, text)
        if job.continue_final_message:
            text = _cut_open(text, content_text(job.messages[-1]["content"]))
        return RenderedChat(text, text[start:])

    def _earlier_turns(self, name: str, job: TemplateJob, text: str) -> str:
        """The text of all turns but the answer's."""
        earlier = job.messages[:-1] if job.continue_final_message else job.messages
        try:
            return self._render(name, replace(job, messages=earlier, add_generation_prompt=False,
                                              continue_final_message=False)) if earlier else ""
        except Exception:  # some templates take no conversation that ends here
            before, words, _ = text.rpartition(content_text(job.messages[-1]["content"]))
            return before if job.continue_final_message else before + words

    def _check_shown(self, name: str, job: TemplateJob, text: str) -> None:
        """Refuse a conversation of which the template leaves out a part.

        Judged by another conversation of the same form, in which every text is a mark of its own: a word of the user
        may also be one of the template's.
        """
        marked = MarkedChat(job.messages, job.tools, last=not job.continue_final_message)
        form = sha256(f"{name}{marked.form}{job.add_generation_prompt}{job.variables}".encode(
            errors="surrogatepass")).hexdigest()
        if form in self._shown_forms:
            return
        try:
            shown = self._render(name, replace(job, messages=marked.messages, tools=marked.tools,
                                               continue_final_message=False))
        except Exception:  # it takes the user's messages all the same
            return
        missing = marked.missing(shown, text)
        if missing is not None:
            raise RequestError(f"the chat template leaves out {missing}; leave it out, or start with another "
                               "--chat-template", param=missing.partition("[")[0])
        if len(self._shown_forms) >= _MAX_FORMS:
            self._shown_forms.clear()
        self._shown_forms.add(form)

    def _render(self, name: str, job: TemplateJob) -> str:
        if name not in self._sources:
            raise TemplateError(f"the model has templates for {', '.join(sorted(self._sources))} and no default one")
        messages = [_with_reasoning(message) for message in job.messages]
        if job.continue_final_message:
            messages[-1] = {**messages[-1], "content": _with_open_end(messages[-1]["content"])}
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self._sources[name])
        return self._compiled[name].render({
            **self._special_tokens, "documents": None, **job.variables, "messages": messages, "tools": job.tools,
            "add_generation_prompt": job.add_generation_prompt})


def _num_common(text: str, other: str) -> int:
    """Length of the prefix that two texts share."""
    if text.startswith(other):
        return len(other)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates of some families read an earlier turn's reasoning under another name."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {**message, "reasoning": reasoning, "thinking": reasoning}


def _with_open_end(content: Any) -> Any:
    if isinstance(content, list) and content:
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _OPEN_END}]
    return (content or "") + _OPEN_END


def _cut_open(text: str, last: str) -> str:
    """The text up to the end of the last message, without what the template appends to messages."""
    end = text.rfind(_OPEN_END.strip())
    if end < 0 or last.strip() not in text:
        raise RequestError("the chat template leaves out the final message, which therefore cannot be continued",
                           param="continue_final_message")
    # A template that trims messages has removed the tag's last space: it would have trimmed this message's end too.
    return text[:end] if text.startswith(_OPEN_END, end) else text[:end].rstrip()


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Refuses underscored names, through which a template could reach into the interpreter."""

    def __init__(*args: Any, **values: Any) -> None:
        # Not `def __init__(self, ...)`: a template may set `self`.
        self, *rest = args
        for name in dict(*rest, **values):
            _check_name(name)
        Namespace.__init__(self, *rest, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("names that begin with an underscore are not allowed in a namespace")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*args: Any, **values: Any) -> dict[str, Any]:
    return dict(*args, **values)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict,
                               namespace=_Namespace)
    return environment
