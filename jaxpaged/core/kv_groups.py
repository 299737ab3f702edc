"""Layers that keep the same tokens form a group; all groups take their memory from one pool of equal units.

The pool is `num_strips` arrays; unit u is entry u of each of them. A layer uses one strip. A group of as many layers as
there are strips spends one unit per block, a group of n layers ceil(n / strips): its block is a bundle of units. With
one group there is a strip per layer, and a block is a unit.

    Gemma 3 27B: 10 full layers, 52 with a window -> 10 strips; a block of the full group is 1 unit, of the other 6.
    gpt-oss: 12 and 12 -> 12 strips, 1 unit and 1.

Layers with a recurrent state form a group, too. Its block is the state of one sequence, of all these layers: a bundle
of as many units as that takes.

    Qwen3-Next 80B: 12 full layers, 36 with 2.2 MB of state each -> 12 strips; a state is 3 slices of 66 units.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

UNBOUNDED = 2**62
NULL_BLOCK = 0  # padding rows write there, and no request references it


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same tokens.

    Attributes:
        window: tokens that a token sees, itself included; None: all.
        width: units of one block.
        save_every: blocks of the other groups between two states of a sequence that are kept for others, beside that at
            the end of its prompt; 0: the group keeps tokens, not a state.
    """

    window: int | None = None
    width: int = 1
    save_every: int = 0

    @property
    def name(self) -> str:
        """Its window, "all" for all tokens, or "state"."""
        return "state" if self.save_every else str(self.window or "all")

    def first_needed(self, position: int, block_size: int) -> int:
        """Index of the first block that the token at `position` sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // block_size

    def prefix_blocks(self, num_blocks: int, block_size: int) -> int:
        """Number of blocks of a prefix of `num_blocks` that the next token sees; they are the last ones."""
        return num_blocks - self.first_needed(num_blocks * block_size, block_size)

    def max_blocks(self, block_size: int, max_chunk: int) -> int:
        """Maximum number of blocks that a request has at once, if a step computes at most `max_chunk` of its tokens."""
        if self.save_every:
            return 1
        if self.window is None:
            return UNBOUNDED
        return -(-(self.window - 1 + max_chunk) // block_size) + 1


def units_for(groups: Sequence[KVGroup], tokens: int, block_size: int, max_chunk: int) -> int:
    """Maximum number of units that a request of `tokens` tokens has at once."""
    blocks = -(-tokens // block_size)
    return sum(group.width * min(blocks, group.max_blocks(block_size, max_chunk)) for group in groups)


def max_tokens(groups: Sequence[KVGroup], num_units: int, block_size: int, max_chunk: int) -> int:
    """Tokens of the longest request that fits into `num_units` units; UNBOUNDED where only windows have to fit."""
    low, high = 0, UNBOUNDED // block_size
    while low < high:
        middle = (low + high + 1) // 2
        fits = units_for(groups, middle * block_size, block_size, max_chunk) <= num_units
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * block_size


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where the keys and values of each layer lie.

    Attributes:
        groups: the group that keeps everything first, then by window.
        num_strips: arrays of the pool.
        strips: the strip of each layer.
        units: of each layer, which of all groups' units: the row of the block tables that it reads. Of a layer with a
            state the number of its slice.
        state_slices: slices of a state; each has as many units as the state of one layer takes of a strip.
    """

    groups: tuple[KVGroup, ...]
    num_strips: int
    strips: tuple[int, ...]
    units: tuple[int, ...]
    state_slices: int = 0

    @property
    def column_units(self) -> int:
        """Units of one block in every group: rows of the block tables."""
        return sum(group.width for group in self.groups)


def make_layout(windows: Sequence[int | None]) -> KVLayout:
    """The layout for layers with these windows.

    There are as many strips as layers that keep everything, since those are what grows; without any, as many as layers
    of the most common window.
    """
    kinds = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    counts = [windows.count(kind) for kind in kinds]
    num_strips = counts[0] if kinds[0] is None else max(counts)
    groups = tuple(KVGroup(kind, -(-count // num_strips)) for kind, count in zip(kinds, counts, strict=True))
    first_unit = {kind: sum(group.width for group in groups[:index]) for index, kind in enumerate(kinds)}
    seen = dict.fromkeys(kinds, 0)
    strips, units = [], []
    for window in windows:
        rank = seen[window]
        seen[window] += 1
        strips.append(rank % num_strips)
        units.append(first_unit[window] + rank // num_strips)
    return KVLayout(groups, num_strips, tuple(strips), tuple(units))


def with_states(layout: KVLayout, has_state: Sequence[bool]) -> KVLayout:
    """The layout of layers that keep tokens, and among them layers with a state, whose states share the strips."""
    tokens, ranks = iter(zip(layout.strips, layout.units, strict=True)), iter(range(len(has_state)))
    places = [divmod(next(ranks), layout.num_strips)[::-1] if state else next(tokens) for state in has_state]
    strips, units = zip(*places, strict=True)
    return replace(layout, strips=strips, units=units, state_slices=-(-sum(has_state) // layout.num_strips))


def state_group(state_units: int, column_units: int) -> KVGroup:
    """The group of states of so many units, beside groups whose blocks together have `column_units`.

    A state is kept as often as it takes no more memory than the blocks that go with it: kept states never fill the
    larger part of the pool, and what has to be computed again before a request that shares a prefix can go on is
    bounded.
    """
    return KVGroup(width=state_units, save_every=-(-state_units // column_units))
