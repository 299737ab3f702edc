"""Tool calls written as JSON objects, `{"name": ..., "arguments": {...}}`, passed on while they are being written."""

import json
from collections.abc import Callable, Generator

from jaxpaged.server.parsers.events import SPACE, CallArguments, CallStart, Emit, EndOfText, Read, Steps, Words, solid

MAX_NAME_CHARS = 256
_ARGUMENTS = ("arguments", "parameters")


class NotACallError(Exception):
    """The text is something else; nothing of it has been passed on."""


class JsonCall:
    """Reads one call.

    Args:
        arguments_needed: an object without arguments is not a call; otherwise it is a call without any.

    Attributes:
        taken: the characters read so far, for a caller who finds that they are no call.
        begun: whether anything has been passed on.
    """

    def __init__(self, emit: Emit, *, arguments_needed: bool = False) -> None:
        self.taken: list[str] = []
        self.begun = False
        self._emit = emit
        self._arguments_needed = arguments_needed
        self._name: str | None = None
        self._early: list[str] | None = None  # arguments that came before the name

    def read(self, first: str = "") -> Steps:
        """Read an object to its closing brace.

        Args:
            first: its opening brace, if the caller has read that already.

        Raises:
            NotACallError: it is none.
        """
        self.taken += first
        try:
            _expect((first or (yield from self._solid())) == "{")
            char = yield from self._solid()
            while char != "}":
                key = yield from self._string(char)
                _expect((yield from self._solid()) == ":")
                char = yield from self._member(key, (yield from self._solid()))
                _expect(char in ",}")
                if char == ",":
                    char = yield from self._solid()
            _expect(self.begun or (self._name is not None and not (self._arguments_needed and self._early is None)))
        except NotACallError:
            if not self.begun:
                raise
            return  # what was passed on stays
        if not self.begun:
            self._begin()
            self._pass_on("".join(self._early or ["{}"]))

    def arguments(self, name: str, char: str) -> Steps:
        """Read an object of arguments alone, whose opening brace is `char`, for a call of this name."""
        self._name = name
        self._begin()
        yield from self._nested(char, self._pass_on)

    def _member(self, key: str, char: str) -> Read:
        """Read a value, and return the first character behind it that is not white space."""
        if key == "name" and self._name is None:
            self._name = yield from self._string(char)
            _expect(0 < len(self._name) <= MAX_NAME_CHARS)
        elif key in _ARGUMENTS and not self.begun and self._early is None:
            return (yield from self._arguments_value(char))
        elif char == '"':
            yield from self._string(char)
        elif char in "{[":
            yield from self._nested(char, lambda text: None)
        else:
            return (yield from self._scalar(char))[1]
        return (yield from self._solid())

    def _arguments_value(self, char: str) -> Read:
        behind = ""
        if char == "{":
            if self._name is None:
                self._early = []
            else:
                self._begin()
            yield from self._nested(char, self._pass_on)
        else:
            if char == '"':  # JSON inside a string
                text = (yield from self._string(char)).strip()
            else:
                text, behind = yield from self._scalar(char)
                _expect(text == "null")
                text = ""
            self._early = [text or "{}"]
            if self._name is not None:
                self._begin()
                self._pass_on(text or "{}")
        return behind or (yield from self._solid())

    def _begin(self) -> None:
        assert self._name is not None
        self.begun = True
        self._emit(CallStart(self._name))

    def _pass_on(self, text: str) -> None:
        if self.begun:
            self._emit(CallArguments(text))
        else:
            assert self._early is not None
            self._early.append(text)

    def _next(self) -> Read:
        char = yield
        if not self.begun:
            self.taken.append(char)
        return char

    def _solid(self) -> Read:
        """The next character that is not white space."""
        while (char := (yield from self._next())) in SPACE:
            pass
        return char

    def _string(self, char: str) -> Read:
        _expect(char == '"')
        raw = [char]
        while (char := (yield from self._next())) != '"':
            raw.append(char)
            if char == "\\":
                raw.append((yield from self._next()))
        try:
            return str(json.loads("".join(raw) + '"', strict=False))
        except ValueError:
            raise NotACallError from None

    def _nested(self, char: str, release: Callable[[str], None]) -> Steps:
        """An object or array, released as it stands; brackets are matched, all else is the model's affair."""
        release(char)
        depth = 1
        while depth:
            char = yield from self._next()
            release(char)
            depth += (char in "{[") - (char in "}]")
            if char == '"':
                while (char := (yield from self._next())) != '"':
                    release(char)
                    if char == "\\":
                        release((yield from self._next()))
                release(char)

    def _scalar(self, char: str) -> Generator[None, str, tuple[str, str]]:
        """A number or word, and the first character behind it that is not white space."""
        text = ""
        while char not in ",}" and char not in SPACE:
            text += char
            _expect(len(text) < 64)
            char = yield from self._next()
        try:
            json.loads(text)
        except ValueError:
            raise NotACallError from None
        return text, char if char not in SPACE else (yield from self._solid())


def one_call(emit: Emit, words: Words, before: str, first: str = "", *,
             arguments_needed: bool = False) -> Generator[None, str, bool]:
    """Read one call; what is none goes to `words`.

    Args:
        before: what has been held back in front of it.
        first: see `JsonCall.read`.

    Returns:
        Whether it was a call.
    """
    call = JsonCall(emit, arguments_needed=arguments_needed)
    try:
        yield from call.read(first)
    except (NotACallError, EndOfText) as error:
        if not call.begun:
            words.add(before + "".join(call.taken))
        if isinstance(error, EndOfText):
            raise
        return False
    words.call()
    return True


def calls_in_brackets(emit: Emit, words: Words, before: str) -> Steps:
    """Read `{...}, {...}]` behind an opening bracket, a call each.

    Args:
        before: what has been held back in front of the first, bracket included.
    """
    while (yield from one_call(emit, words, before)):
        before = ""
        char = yield from solid()
        if char != ",":
            if char != "]":
                words.add(char)
            return


def _expect(good: bool) -> None:
    if not good:
        raise NotACallError
