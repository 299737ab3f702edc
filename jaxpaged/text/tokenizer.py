"""Text to token ids and back. Nothing here needs JAX or PyTorch."""

import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxpaged.core.errors import RequestError
from jaxpaged.core.tool_formats import PLAIN_CALLS, ToolCallFormat
from jaxpaged.text.chat_template import RESERVED, ChatTemplate, RenderedChat, Renderer, TemplateJob
from jaxpaged.text.placeholders import Placeholders, any_of
from jaxpaged.text.template_traits import ContentFormat, TemplateTraits
from jaxpaged.text.token_bytes import find_byte_rule, find_max_token_chars

# Texts and ids of this length or more go through the library's batch calls, which release the GIL. Shorter ones do
# not: after a batch call the library warns users who fork their process.
_LONG = 4096
_SPACES = " \t\r\n▁ĠĊĉč"  # as vocabularies spell them


class Tokenizer:
    """A tokenizer and its chat template. All methods may be called from several threads at once.

    Attributes:
        hf: the transformers object, for users; changing it is not safe while requests run.
        backend: the `tokenizers` object inside.
        vocab_size: number of ids, added tokens included; the model's own vocabulary may be padded beyond it.
        eos_token_ids: ids that end a text, as far as the tokenizer's files name them.
        byte_rule: how tokens become bytes, None for a decoder of another kind.
        max_token_chars: maximum characters of text that one token decodes to; None where there is no bound.
        render_chat_template: renders in place of `own_chat_template`, for a server that can cut a template off.
        template_traits: what the templates read and show, found out by that server; None to find out here.
    """

    def __init__(self, hf: Any, eos_token_ids: Iterable[int] = (), *, content_format: ContentFormat = "auto") -> None:
        self.hf = hf
        self._content_format = content_format
        self.backend: Backend = hf.backend_tokenizer
        # Some tokenizer.json files carry the settings of their training, which would shorten a prompt silently.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = len(hf)
        ends = {*eos_token_ids, hf.eos_token_id}
        self.eos_token_ids = frozenset(number for number in ends if number is not None)
        added = self.backend.get_added_tokens_decoder()
        self._added = {token.content: token for token in added.values()}
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._special_ids = {text: number for number, text in self._special.items()}
        self.byte_rule = find_byte_rule(self.backend)
        self.max_token_chars = find_max_token_chars(self.backend, self.byte_rule, added.values())
        self.render_chat_template: Renderer | None = None
        self.template_traits: Mapping[str, TemplateTraits] | None = None
        self._template: tuple[Any, ChatTemplate] | None = None
        self._bytes: dict[int, bytes] = {}
        self._marks: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._adds_bos = self._find_adds_bos()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into ids. Special tokens written in the text become their ids.

        Args:
            text: any text; a BOS token that it starts with is not added a second time.
            add_special_tokens: add what the tokenizer adds, such as a BOS token.

        Raises:
            RequestError: the text has unpaired surrogates, which no UTF-8 text has.
        """
        return self._with_one_bos(self._encode(self.backend, text, add_special_tokens), add_special_tokens)

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of plain text that continues another: without the space that some tokenizers put before a text, and
        without special tokens."""
        backend, opening = self.backend, self._opening
        if self._special_pattern.search(text):
            with self._lock:
                backend, _, _ = self._literal
        return self._encode(backend, opening + text, False)[len(self._encode(backend, opening, False)):]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turn ids into text at once; ids without a token are ignored."""
        if len(ids) < _LONG:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        [text] = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether this is a special token, which `skip_special_tokens` hides."""
        return token_id in self._special

    def special_id(self, text: str) -> int | None:
        """The special token with this text, or None."""
        return self._special_ids.get(text)

    def ids_of_mark(self, mark: str) -> tuple[int, ...]:
        """The tokens that are this ASCII text and nothing but white space after it; searched for once for each."""
        found = self._marks.get(mark)
        if found is None:
            found = self._marks[mark] = tuple(sorted(
                number for token, number in self.backend.get_vocab().items()
                if token.startswith(mark) and not token[len(mark):].strip(_SPACES)))
        return found

    def knows_mark(self, mark: str) -> bool:
        """Whether the model has been made to write this mark: its chat template writes it, or the tokenizer has added
        tokens that are or begin it."""
        templates = self.hf.chat_template or ""
        sources = templates.values() if isinstance(templates, dict) else [templates]
        begins = (text.strip() for text in self._added)
        return (bool(self.ids_of_mark(mark)) or any(mark in source for source in sources)
                or any(len(text) > 1 and mark.startswith(text) for text in begins))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; several tokens may share the bytes of one character.

        Where `byte_rule` is None this is the UTF-8 of the token decoded alone.
        """
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._token_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; U+FFFD where it is a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> tuple[str, list[int]]:
        """The text of a conversation's prompt and its ids; see `encode_chat`."""
        rendered, ids = self.encode_chat(messages, **options)
        return rendered.text, ids

    def encode_chat(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
                    add_generation_prompt: bool = True, continue_final_message: bool = False,
                    chat_template_kwargs: dict[str, Any] | None = None, add_special_tokens: bool = False,
                    wants_turn: bool = False, calls: ToolCallFormat = PLAIN_CALLS,
                    check: Callable[[str], None] | None = None) -> tuple[RenderedChat, list[int]]:
        """Apply the chat template and encode its text.

        Unless asked otherwise, only the template writes special tokens, the BOS token included: the text
        of one inside a message (or a name, a tool, its result, a template argument) is encoded as ordinary text.

        Args:
            messages: normalized messages.
            tools: in OpenAI's form.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: leave the last message open, for the model to continue it.
            chat_template_kwargs: further variables of the template.
            add_special_tokens: add what the tokenizer adds to a text, where the template has not written it.
            wants_turn: tell what of the text belongs to the turn of the answer.
            calls: how the model writes tool calls, for a template that does not show them.
            check: called with the rendered text before it is tokenized; may raise.

        Returns:
            The prompt's text and its ids.

        Raises:
            RequestError: no template, one that refuses these messages or leaves out a part of them, or bad arguments.
        """
        if not self.hf.chat_template:
            raise RequestError("the model has no chat template; use completions, or start with --chat-template",
                               param="messages")
        if add_generation_prompt and continue_final_message:
            raise RequestError("continue_final_message needs add_generation_prompt to be false",
                               param="continue_final_message")
        variables = self._check_template_kwargs(chat_template_kwargs)
        traits = self.template_traits if self.render_chat_template else self.own_chat_template().traits
        try:
            placeholders = Placeholders(self._special_pattern, (messages, tools, variables))
            job = TemplateJob(placeholders.hide(messages), placeholders.hide(tools), add_generation_prompt,
                              continue_final_message, placeholders.hide(variables), wants_turn,
                              traits, calls)
        except RecursionError:
            raise RequestError("the messages are nested too deeply", param="messages") from None
        render = self.render_chat_template or self.own_chat_template().render
        rendered = render(job)
        text = rendered.text
        if check is not None:
            check(text)
        if placeholders.used:
            ids = self._encode_with_placeholders(text, placeholders, add_special_tokens)
        else:
            ids = self._encode(self.backend, text, add_special_tokens, "messages")
        shown = RenderedChat(placeholders.restore(text), placeholders.restore(rendered.turn))
        return shown, self._with_one_bos(ids, add_special_tokens)

    def own_chat_template(self) -> ChatTemplate:
        """The model's template, or the one given in its place."""
        source = self.hf.chat_template
        template = self._template
        if template is None or template[0] != source:  # users may set another one on `hf`
            template = self._template = (source, ChatTemplate(
                source, self.hf.special_tokens_map, self._content_format))
        return template[1]

    def _check_template_kwargs(self, given: dict[str, Any] | None) -> dict[str, Any]:
        if given is None:
            return {}
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
        for name in given:
            if name in RESERVED or name in self.hf.special_tokens_map:
                raise RequestError(f"chat_template_kwargs must not set {name}", param="chat_template_kwargs")
        return given

    @cached_property
    def _opening(self) -> str:
        """A prefix after which text is encoded as in the middle of another: empty, or a character that no vocabulary
        joins with others."""
        bare = b"".join(map(self.token_bytes, self._encode(self.backend, "a", False))) == b"a"
        return "" if bare else "\x02"

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return any_of(self._special.values())

    @cached_property
    def _literal(self) -> tuple[Backend, dict[str, str], dict[int, int]]:
        """A copy that reads special-token text as ordinary text and knows each special token by an unguessable alias.

        The aliases are added tokens with the same flags: text around them is cut and prefixed as around the originals.
        Made on first use: few chats contain special-token text, and a copy takes time and memory.

        Returns:
            The copy, special-token text -> alias, and alias id -> special id.
        """
        backend = deepcopy(self.backend)
        backend.encode_special_tokens = True
        nonce = secrets.token_hex(16)
        aliases = {text: f"<{nonce}:{number}>" for number, text in self._special.items()}
        backend.add_tokens([
            AddedToken(alias, lstrip=self._added[text].lstrip, rstrip=self._added[text].rstrip,
                       single_word=self._added[text].single_word, normalized=False, special=False)
            for text, alias in aliases.items()])
        numbers = backend.get_vocab()
        return backend, aliases, {numbers[aliases[text]]: number for number, text in self._special.items()}

    def _encode_with_placeholders(self, text: str, placeholders: Placeholders, add_special_tokens: bool) -> list[int]:
        with self._lock:
            backend, aliases, originals = self._literal
        # Other added tokens take part in the search, since the leftmost of all wins, and stay as they are.
        marked = any_of(self._added).sub(lambda found: aliases.get(found[0], found[0]), text)
        ids = self._encode(backend, placeholders.restore(marked), add_special_tokens, "messages")
        return [originals.get(number, number) for number in ids]

    def _encode(self, backend: Backend, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        try:
            if len(text) < _LONG:
                return backend.encode(text, add_special_tokens=add_special_tokens).ids
            [encoded] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoded.ids
        except TypeError:
            if not isinstance(text, str):
                raise
            raise RequestError("the text has unpaired surrogates, which UTF-8 cannot hold", param=param) from None

    def _with_one_bos(self, ids: list[int], added: bool) -> list[int]:
        """The ids without the BOS token that encoding adds before one that the text itself starts with."""
        return ids[1:] if added and self._adds_bos and ids[1:2] == [self.hf.bos_token_id] else ids

    def _find_adds_bos(self) -> bool:
        """Whether encoding adds a BOS token."""
        with_special, without = (self.backend.encode("a", add_special_tokens=value).ids for value in (True, False))
        return with_special[:1] == [self.hf.bos_token_id] and without[:1] != with_special[:1]

    def _token_bytes(self, token_id: int) -> bytes:
        if self.byte_rule is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self.byte_rule.bytes_of(token)
