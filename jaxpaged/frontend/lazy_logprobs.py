"""Log probabilities that become objects only where they are read.

Those of a large answer are a million objects, through which the garbage collector would walk again and again.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, overload

from jaxpaged.core.messages import PackedLogprobs, TokenLogprobs
from jaxpaged.core.outputs import Logprob

Entry = dict[int, Logprob]
MakeEntry = Callable[[int, TokenLogprobs], Entry]
_Item = TypeVar("_Item", covariant=True)


class _Lazy(Sequence[_Item]):
    """A sequence whose items are made by `_item`."""

    @overload
    def __getitem__(self, index: int) -> _Item: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[_Item, ...]: ...

    def __getitem__(self, index: int | slice) -> _Item | tuple[_Item, ...]:
        numbers = range(len(self))[index]
        return self._item(numbers) if isinstance(numbers, int) else tuple(map(self._item, numbers))

    def _item(self, number: int) -> _Item:
        raise NotImplementedError


class LazyLogprobs(_Lazy[Entry]):
    """One entry for each of some tokens.

    Args:
        ids: of the tokens.
        found: for each of them.
        make_entry: makes an entry of both.
    """

    def __init__(self, ids: Sequence[int], found: Sequence[TokenLogprobs], make_entry: MakeEntry) -> None:
        assert len(ids) == len(found), "each token has log probabilities"
        self._ids, self._found, self._make_entry = ids, found, make_entry

    def __len__(self) -> int:
        return len(self._ids)

    def _item(self, number: int) -> Entry:
        return self._make_entry(self._ids[number], self._found[number])

    @classmethod
    def joined(cls, parts: "Sequence[LazyLogprobs]") -> "LazyLogprobs":
        """All of these, one after the other."""
        found = PackedLogprobs()
        for part in parts:
            found.extend(part._found)
        return cls(tuple(token for part in parts for token in part._ids), found, parts[0]._make_entry)


class LazyPromptLogprobs(_Lazy[Entry | None]):
    """One entry for each token of a prompt; None for the first."""

    def __init__(self, rest: Sequence[Entry]) -> None:
        self._rest = rest

    def __len__(self) -> int:
        return len(self._rest) + 1

    def _item(self, number: int) -> Entry | None:
        return self._rest[number - 1] if number else None


class EchoedLogprobs(_Lazy[Entry]):
    """The entries of a prompt, the first of them empty, and those of the text after it."""

    def __init__(self, prompt: Sequence[Entry | None], rest: Sequence[Entry]) -> None:
        self._prompt, self._rest = prompt, rest

    def __len__(self) -> int:
        return len(self._prompt) + len(self._rest)

    def _item(self, number: int) -> Entry:
        after = number - len(self._prompt)
        return (self._prompt[number] or {}) if after < 0 else self._rest[after]


def join_logprobs(parts: Iterable[Sequence[Entry]]) -> Sequence[Entry]:
    """The entries of consecutive outputs."""
    parts = list(parts)
    lazy = [part for part in parts if isinstance(part, LazyLogprobs)]
    if lazy and len(lazy) == len(parts):
        return LazyLogprobs.joined(lazy)
    return tuple(entry for part in parts for entry in part)
