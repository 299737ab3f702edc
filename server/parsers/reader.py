"""The characters of a text that grows, with a way back to those already read."""

from collections.abc import Callable

from jaxpaged.server.parsers.events import SPACE, EndOfText, Parsing, Read


class CharReader:
    """Gives a parser its characters. After the end of the text, what is given back can still be read."""

    def __init__(self) -> None:
        self._back: list[str] = []  # the last is the next
        self._taken: list[str] | None = None
        self._ended = False

    @classmethod
    def of_text(cls, text: str) -> "CharReader":
        """A reader of a whole text: parsers that read it never wait."""
        reader = cls()
        reader.give_back(text)
        reader._ended = True
        return reader

    def next(self) -> Read:
        """The next character.

        Raises:
            EndOfText: there is none.
        """
        if self._back:
            char = self._back.pop()
        elif self._ended:
            raise EndOfText
        else:
            try:
                char = yield
            except EndOfText:
                self._ended = True
                raise
        if self._taken is not None:
            self._taken.append(char)
        return char

    def give_back(self, text: str) -> None:
        """Let the text just read be read again."""
        self._back += reversed(text)
        if self._taken is not None and text:
            del self._taken[-len(text):]

    def start_recording(self) -> None:
        """Remember what is read from now on."""
        self._taken = []

    def stop_recording(self) -> str:
        """What was read since `start_recording`."""
        text = "".join(self._taken or ())
        self._taken = None
        return text

    def next_non_space(self) -> Read:
        """Drop white space, and return the first other character."""
        while (char := (yield from self.next())) in SPACE:
            pass
        return char

    def accept(self, *tags: str) -> Read:
        """Drop white space, and one of the tags if it follows; return it, else an empty string."""
        held = ""
        try:
            while held not in tags:
                char = yield from self.next()
                if held or char not in SPACE:
                    held += char
                if not any(tag.startswith(held) for tag in tags):
                    break
        except EndOfText:
            pass
        if held in tags:
            return held
        self.give_back(held)
        return ""

    def until(self, tags: tuple[str, ...], release: Callable[[str], None], *, space: bool = False) -> Read:
        """Release text up to a tag, holding back only what may be the start of one; return the tag.

        Args:
            space: white space right before a tag belongs to it.
        """
        held = ""
        try:
            while (found := held.lstrip() if space else held) not in tags:
                if any(tag.startswith(found) for tag in tags):
                    held += yield from self.next()
                else:
                    release(held[0])
                    held = held[1:]
        except EndOfText:
            release(held)
            raise
        return found

    def rest(self, release: Callable[[str], None]) -> Parsing:
        """Release the rest of the text."""
        while True:
            release((yield from self.next()))
