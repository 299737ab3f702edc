"""KV groups: which memory each layer has, and how many blocks a request holds, against counting by hand."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.kv_groups import UNBOUNDED, KVGroup, make_layout, max_tokens, units_for

WINDOWS = st.one_of(st.none(), st.integers(1, 50))
GROUPS = st.lists(st.builds(KVGroup, WINDOWS, st.integers(1, 4)), min_size=1, max_size=3,
                  unique_by=lambda group: group.window)


@given(windows=st.lists(st.sampled_from([None, 4, 9, 32]), min_size=1, max_size=40))
def test_each_layer_has_memory_of_its_own_in_a_unit_of_its_group(windows: list[int | None]) -> None:
    layout = make_layout(windows)
    places = list(zip(layout.strips, layout.units, strict=True))
    assert len(set(places)) == len(windows) and set(layout.strips) == set(range(layout.num_strips))
    owner = [group.window for group in layout.groups for _ in range(group.width)]
    assert [owner[unit] for unit in layout.units] == windows and len(owner) == layout.column_units
    kinds = [group.window for group in layout.groups]
    assert kinds == sorted(set(windows), key=lambda window: -1 if window is None else window)
    for group in layout.groups:  # no unit of which no layer uses a part, and where everything is kept no part unused
        assert (group.width - 1) * layout.num_strips < windows.count(group.window) <= group.width * layout.num_strips
        assert group.window is not None or windows.count(None) == group.width * layout.num_strips


@pytest.mark.parametrize(("windows", "strips", "groups"), [
    ([None] * 32, 32, (KVGroup(),)),
    ([4096] * 32, 32, (KVGroup(4096),)),
    ([*[1024] * 5, None] * 10 + [1024] * 2, 10, (KVGroup(), KVGroup(1024, 6))),  # Gemma 3 27B
    ([128, None] * 12, 12, (KVGroup(), KVGroup(128))),  # gpt-oss
    ([None] * 28 + [4096] * 4, 28, (KVGroup(), KVGroup(4096))),  # Qwen2 with max_window_layers
    ([8, 8, 64], 2, (KVGroup(8), KVGroup(64))),
])
def test_layouts_of_known_models(windows: Sequence[int | None], strips: int, groups: tuple[KVGroup, ...]) -> None:
    layout = make_layout(windows)
    assert (layout.num_strips, layout.groups) == (strips, groups)


@given(window=WINDOWS, block_size=st.integers(1, 20), position=st.integers(0, 300))
def test_the_first_block_that_a_token_sees(window: int | None, block_size: int, position: int) -> None:
    group = KVGroup(window)
    seen = [other for other in range(position + 1) if window is None or position - other < window]
    assert group.first_needed(position, block_size) == seen[0] // block_size
    blocks = {other // block_size for other in seen if other < position // block_size * block_size}
    if position % block_size == 0:  # a prefix ends before it
        assert group.prefix_blocks(position // block_size, block_size) == len(blocks)


@given(group=st.builds(KVGroup, WINDOWS, st.integers(1, 3)), block_size=st.integers(1, 20),
       max_chunk=st.integers(1, 60), chunks=st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_a_request_never_holds_more_than_it_is_said_to(
    group: KVGroup, block_size: int, max_chunk: int, chunks: list[int]
) -> None:
    """Before each chunk the blocks that none of its tokens sees are freed, then those that it begins are allocated."""
    computed, most = 0, 0
    for chunk in [min(chunk, max_chunk) for chunk in chunks]:
        held = -(-(computed + chunk) // block_size) - group.first_needed(computed, block_size)
        most = max(most, held * group.width)
        computed += chunk
    assert most <= units_for([group], computed, block_size, max_chunk)


@given(groups=GROUPS, num_units=st.integers(0, 200), block_size=st.integers(1, 20), max_chunk=st.integers(1, 60))
def test_the_longest_request_is_the_last_that_fits(
    groups: list[KVGroup], num_units: int, block_size: int, max_chunk: int
) -> None:
    longest = max_tokens(groups, num_units, block_size, max_chunk)
    assert units_for(groups, longest, block_size, max_chunk) <= num_units
    if longest < UNBOUNDED // 2:
        assert units_for(groups, longest + 1, block_size, max_chunk) > num_units
    else:
        assert all(group.window is not None for group in groups)
