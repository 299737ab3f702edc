"""Finding stop strings in a text that grows, in time proportional to the new text."""

from collections.abc import Iterable


class StopStrings:
    """Watches one text for the first end of any of several strings.

    Text that could be the beginning of a stop string, and only that, is held back until it is decided. After a stop
    string nothing may be added.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._searches = [_Search(string) for string in dict.fromkeys(strings)]
        self._firsts = {string.string[0] for string in self._searches}
        self._held = ""

    def add(self, text: str, ends: bool = True) -> tuple[str, str | None]:
        """Go on with new text.

        Args:
            ends: whether a stop string that ends within it counts; what only begins in it may count later.

        Returns:
            What is decided, and the stop string that it ends with or None. Of strings that end at the same place the
            longest counts. Text behind a stop string is dropped.
        """
        if not self._held and not any(first in text for first in self._firsts):
            return text, None
        whole = self._held + text
        for place, char in enumerate(text, len(self._held) + 1):
            found = [search.string for search in self._searches if search.step(char)]
            if found and ends:
                self._held = ""
                return whole[:place], max(found, key=len)
        decided = len(whole) - max(search.matched for search in self._searches)
        self._held = whole[decided:]
        return whole[:decided], None

    def release(self) -> str:
        """Return what is held back, once no more text follows."""
        held, self._held = self._held, ""
        return held


class _Search:
    """Knuth, Morris and Pratt's search for one string, its table made only as far as the text matches."""

    __slots__ = ("_borders", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        # _borders[k]: length of the longest proper prefix of string[:k] that is also its suffix.
        self._borders = [0, 0]

    def step(self, char: str) -> bool:
        """Take one character; True if the string ends with it.

        `matched` is the length of the longest prefix, the whole string left out, that the text now ends with.
        """
        string, borders = self.string, self._borders
        self.matched = self._longest(self.matched, char)
        if self.matched == len(borders):
            borders.append(self._longest(borders[-1], char))
        if self.matched < len(string):
            return False
        self.matched = borders[self.matched]
        return True

    def _longest(self, length: int, char: str) -> int:
        while length and self.string[length] != char:
            length = self._borders[length]
        return length + (self.string[length] == char)
