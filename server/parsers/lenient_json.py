"""JSON as small models write it: read character by character, and released as valid JSON.

Valid JSON is released as it is, while it is read. What is repaired: quotation marks and control characters that lack a
backslash, unknown escapes, single quotes, Python's words, bare keys and texts, commas that are missing or too many,
brackets that are missing or doubled. At the end of the text, what is open is closed, and a member
without a value is dropped.
"""

import enum
import json
import re
from collections.abc import Callable, Generator

from jaxpaged.server.parsers.events import SPACE, EndOfText, Parsing, Read
from jaxpaged.server.parsers.reader import CharReader

MAX_DEPTH = 100  # deeper lists and objects end the value: other JSON parsers refuse them
MAX_NUMBER_CHARS = 300  # a longer one becomes a string, for the same reason
_CLOSING = {"{": "}", "[": "]"}
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null",
          "undefined": "null", "NaN": "null", "Infinity": "null", "-Infinity": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SECOND_SURROGATE = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_QUOTES = "\"'"
_HEX = "0123456789abcdefABCDEF"
Release = Callable[[str], None]


class _Place(enum.Enum):
    """Where in a container its reader is."""

    FIRST = enum.auto()  # behind an opening bracket
    NEXT = enum.auto()  # behind a comma
    COLON = enum.auto()  # behind a key
    VALUE = enum.auto()  # behind a colon
    AFTER = enum.auto()  # behind a value


class BrokenError(Exception):
    """Something that cannot be repaired follows. What was released is closed and valid."""


class LenientJson:
    """Reads values.

    Args:
        begin, end: the tags of a call, if there are any. `end` ends a value; within a string only where nothing, or
            `begin`, follows it.
    """

    def __init__(self, reader: CharReader, begin: str = "", end: str = "") -> None:
        self._reader, self._begin, self._end = reader, begin, end

    def value(self, char: str, release: Release) -> Parsing:
        """Read a value that starts with this character, which has been read.

        Raises:
            BrokenError: see there.
            EndOfText: the value ends with the text, and is closed.
        """
        if char in _CLOSING:
            yield from self.container(char, release)
        elif char in _QUOTES:
            yield from self._string(char, release, ",}]")
        elif char in ",}]" or char == self._end[:1]:
            self._reader.give_back(char)
            release("null")
        else:
            release((yield from self._scalar(char)))

    def key(self, char: str) -> Read:
        """Read a key that starts with this character; returns it as a JSON string.

        Raises:
            BrokenError: there is no key; nothing was read.
            EndOfText: the text ends before the key does.
        """
        if char in _QUOTES:
            parts: list[str] = []
            yield from self._string(char, parts.append, ":,}")
            return "".join(parts)
        name, space = "", ""
        while char.isalnum() or char in "_-$":
            name += char
            char = yield from self._reader.next()
        while char in SPACE:
            space += char
            char = yield from self._reader.next()
        self._reader.give_back(space + char)
        if not name or char != ":":
            self._reader.give_back(name)
            raise BrokenError
        return _quoted(name)

    def container(self, opening: str, release: Release) -> Parsing:
        """Read an object or list whose opening bracket has been read.

        Raises:
            BrokenError, EndOfText: see `value`.
        """
        release(opening)
        closing = [_CLOSING[opening]]  # of the open containers; "}}" where the brace is doubled
        place = _Place.FIRST
        gap, key = "", ""  # white space and comma, key and colon: held until the value comes
        doubled = False  # the container that has just ended
        try:
            while closing:
                char = yield from self._reader.next()
                if doubled and char == "}":
                    doubled = False
                    continue
                doubled = False
                if char in SPACE:
                    if key:
                        key += char
                    else:
                        gap += char
                elif char in ",}]":
                    if char != "," and all(item[0] != char for item in closing):
                        continue
                    if place is _Place.VALUE:
                        release(f"{gap}{key}null")
                        gap, place = "", _Place.AFTER
                    elif place is _Place.COLON:  # a key alone is dropped
                        place = _Place.NEXT if "," in gap else _Place.FIRST
                    key = ""
                    if char != ",":
                        release(gap if place in (_Place.FIRST, _Place.AFTER) else "")
                        while closing[-1][0] != char:
                            release(closing.pop()[0])
                        doubled = len(closing[-1]) > 1
                        release(closing.pop()[0])
                        gap, place = "", _Place.AFTER
                    elif place is _Place.AFTER:
                        gap, place = gap + char, _Place.NEXT
                elif closing[-1][0] == "}" and place in (_Place.FIRST, _Place.NEXT, _Place.AFTER):
                    if char == "{" and place is _Place.FIRST:
                        closing[-1] = "}}"
                        continue
                    key = yield from self.key(char)
                    gap, place = "," * (place is _Place.AFTER) + gap, _Place.COLON
                elif char == ":" and key:
                    key += char * (place is _Place.COLON)
                    place = _Place.VALUE
                elif (self._end and char == self._end[0]) or (char in _CLOSING and len(closing) >= MAX_DEPTH):
                    self._reader.give_back(char)
                    raise BrokenError
                else:
                    before = "," * (place is _Place.AFTER) + gap + key + ":" * (place is _Place.COLON)
                    gap, key, place = "", "", _Place.AFTER
                    if char in _CLOSING:
                        release(before + char)
                        closing.append(_CLOSING[char])
                        place = _Place.FIRST
                    elif char in _QUOTES:
                        release(before)
                        yield from self._string(char, release, ",}]")
                    else:
                        release(before + (yield from self._scalar(char)))
        except (BrokenError, EndOfText):
            release("".join(item[0] for item in reversed(closing)))
            raise

    def _string(self, quote: str, release: Release, behind: str) -> Parsing:
        """Read a string whose opening quotation mark has been read; one of `behind` follows the closing one."""
        release('"')
        try:
            while True:
                char = yield from self._reader.next()
                if char == quote and (yield from self._is_followed_by(behind)):
                    break
                if char == "\\":
                    yield from self._escape(release)
                elif char == '"' or char < " ":
                    release(_quoted(char)[1:-1])
                elif self._end and char == self._end[0] and (yield from self._ends_here(char)):
                    break
                else:
                    release(char)
        finally:
            release('"')

    def _is_followed_by(self, behind: str) -> Generator[None, str, bool]:
        """Whether one of these characters, the end tag or nothing follows, white space aside. Reads nothing."""
        held = ""
        try:
            while (char := (yield from self._reader.next())) in SPACE:
                held += char
            held += char
        except EndOfText:
            return True
        finally:
            self._reader.give_back(held)
        missing_comma = char == '"' and "\n" in held
        return char in behind or missing_comma or char == self._end[:1]

    def _ends_here(self, char: str) -> Generator[None, str, bool]:
        """Whether this character starts the tag that ends a call and its unclosed string; if so it is given back."""
        held, rest = char, ""
        try:
            while held != self._end:
                if not self._end.startswith(held):
                    self._reader.give_back(held[1:])
                    return False
                held += yield from self._reader.next()
            while rest != self._begin and self._begin.startswith(rest):
                char = yield from self._reader.next()
                held += char
                rest += char.strip(SPACE) if not rest else char
        except EndOfText:
            if not held.startswith(self._end):
                self._reader.give_back(held[1:])
                return False
            rest = self._begin
        ends = rest == self._begin
        self._reader.give_back(held if ends else held[1:])
        return ends

    def _escape(self, release: Release) -> Parsing:
        """Read what a backslash escapes; the backslash has been read, and is text where it escapes nothing."""
        char = yield from self._reader.next()
        if char in '"\\/bfnrt':
            release("\\" + char)
        elif char in "ux":
            size = 4 if char == "u" else 2
            code = ""
            while len(code) < size and (digit := (yield from self._reader.next())) in _HEX:
                code += digit
            if len(code) == size:
                yield from self._code_point(code.rjust(4, "0"), release)
            else:
                self._reader.give_back(digit)
                release(f"\\\\{char}{code}")
        elif char >= " ":
            self._reader.give_back(char)
            if char != "'":
                release("\\\\")
        else:
            self._reader.give_back(char)

    def _code_point(self, code: str, release: Release) -> Parsing:
        """Release an escaped code point; half of a surrogate pair becomes a replacement character."""
        if not "d800" <= code.lower() <= "dfff":
            release("\\u" + code)
            return
        held = ""
        try:
            while code.lower() < "dc00" and len(held) < 6:
                held += yield from self._reader.next()
        except EndOfText:
            pass
        if _SECOND_SURROGATE.fullmatch(held):
            release(f"\\u{code}{held}")
        else:
            self._reader.give_back(held)
            release("\\ufffd")

    def _scalar(self, char: str) -> Read:
        """Read a number, a word or a bare text, and return it as JSON.

        Raises:
            EndOfText: the text ends within what may become a word or number.
        """
        parts = []
        ended = False
        try:
            while char not in ",}]\"\r\n" and char != self._end[:1]:
                parts.append(char)
                char = yield from self._reader.next()
            self._reader.give_back(char)
        except EndOfText:
            ended = True
        text = "".join(parts).strip()
        number = text.lstrip("+").replace("_", "")
        number = "0" * number.startswith(".") + number + "0" * number.endswith(".")
        if text in _WORDS:
            return _WORDS[text]
        if len(number) <= MAX_NUMBER_CHARS and _NUMBER.fullmatch(number):
            return number
        if ended and (any(word.startswith(text) for word in _WORDS) or _NUMBER.match(text)):
            raise EndOfText
        return _quoted(text)


def repaired_object(text: str) -> str | None:
    """The JSON object that a text holds, repaired; None if it does not start like one."""
    reader, parts = CharReader.of_text(text.strip()), list[str]()
    try:
        for _ in _first_object(reader, parts.append):
            raise AssertionError("a reader of a whole text waits")
    except (BrokenError, EndOfText):
        pass
    return "".join(parts) or None


def _first_object(reader: CharReader, release: Release) -> Parsing:
    if (yield from reader.next()) == "{":
        yield from LenientJson(reader).container("{", release)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
