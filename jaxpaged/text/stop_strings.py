"""Finding stop strings in a text that grows, in time proportional to the new text."""

from collections.abc import Iterable


class StopStrings:
    """Watches one text for the first end of any of several strings.

    Text that may be the start of a stop string, and only that, is held back until it is decided. After a stop string
    nothing may be added.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = tuple(dict.fromkeys(strings))
        self._firsts = {string[0] for string in self._strings}
        self._held = ""

    def add_text(self, text: str, ends: bool = True) -> tuple[str, str | None]:
        """Add new text.

        Args:
            ends: whether a stop string that ends within it counts; what only begins in it may count later.

        Returns:
            The text that is decided, and the stop string that it ends with or None. Of strings that end at the same
            index the longest counts. Text after a stop string is dropped.
        """
        if not self._held and not any(first in text for first in self._firsts):
            return text, None
        known, text = len(self._held), self._held + text
        if ends:
            for end in range(known + 1, len(text) + 1):
                if text.endswith(self._strings, 0, end):
                    self._held = ""
                    text = text[:end]
                    return text, max(filter(text.endswith, self._strings), key=len)
        decided = self._find_undecided(text)
        self._held = text[decided:]
        return text[:decided], None

    def release(self) -> str:
        """Return what is held back, once no more text follows."""
        held, self._held = self._held, ""
        return held

    def _find_undecided(self, text: str) -> int:
        """Index of the longest suffix that a stop string starts with and goes beyond.

        A start that no stop string has in common with the text is never looked at again: the next call begins after
        it. So the time stays linear, however often a long stop string nearly matches.
        """
        for start, char in enumerate(text):
            if char in self._firsts:
                suffix = text[start:]
                if any(len(string) > len(suffix) and string.startswith(suffix) for string in self._strings):
                    return start
        return len(text)
