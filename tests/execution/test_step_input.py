"""The padded buffer of a step against a loop that writes it down row by row."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.execution.step_input import IN_FLIGHT, pad_step, unpack_step
from jaxpaged.scheduling.scheduler_output import ScheduledChunk, SchedulerOutput

NULL_SLOT = 40


@st.composite
def steps(draw: st.DrawFn) -> tuple[SchedulerOutput, int, int]:
    """A step as the scheduler makes them, its block size, and the units of a block."""
    units = draw(st.integers(1, 3))
    block_size = draw(st.sampled_from([1, 2, 5, 16]))
    slots = draw(st.lists(st.integers(0, NULL_SLOT - 1), unique=True, min_size=1, max_size=6))
    ids, blocks = st.integers(0, 2**31 - 1), st.integers(1, 1000)
    chunks = []
    for slot in slots:
        start, length = draw(st.integers(0, 40)), draw(st.integers(1, 20))
        begun = [position for position in range(start, start + length) if position % block_size == 0]
        chunks.append(ScheduledChunk(
            request_id="r", slot=slot, start=start, num_tokens=length,
            num_samples=draw(st.one_of(st.integers(0, 1), st.integers(0, length))),
            token_ids=draw(st.lists(ids, min_size=length - draw(st.booleans()), max_size=length)),
            blocks=[draw(st.lists(blocks, min_size=len(begun), max_size=len(begun))) for _ in range(units)]))
        if chunks[-1].num_samples and draw(st.booleans()):  # another choice of the same prompt
            chunks.append(ScheduledChunk("s", NULL_SLOT - 1 - slot % 7, start + length, (), 0, 1, ()))
    return _step(chunks), block_size, units


def _step(chunks: Sequence[ScheduledChunk]) -> SchedulerOutput:
    return SchedulerOutput(tuple(chunks), sum(chunk.num_tokens for chunk in chunks),
                           sum(chunk.num_samples for chunk in chunks))


def naive(chunks: Sequence[ScheduledChunk], block_size: int,
          units: int) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """(slot, position, token id, units of the new block) of each row, rows to sample after, and slots to sample for."""
    rows: list[tuple[int, ...]] = []
    sampled: list[int] = []
    slots: list[int] = []
    for chunk in chunks:
        ids, blocks = list(chunk.token_ids), list(zip(*chunk.blocks, strict=True))
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            token = ids.pop(0) if ids else IN_FLIGHT
            block = blocks.pop(0) if position % block_size == 0 else (-1,) * units
            rows.append((chunk.slot, position, token, *block))
        sampled += range(len(rows) - chunk.num_samples, len(rows))
        slots += [chunk.slot] * chunk.num_samples
    return rows, sampled, slots


@given(steps(), st.integers(0, 9), st.integers(0, 3))
def test_every_row_is_where_it_belongs(case: tuple[SchedulerOutput, int, int], spare: int, spare_samples: int) -> None:
    step, block_size, units = case
    size, num_samples = step.num_tokens + spare, step.num_sampled + spare_samples
    buffer = pad_step(step, size=size, num_samples=num_samples, null_slot=NULL_SLOT, block_size=block_size,
                      units=units)
    assert buffer.dtype == np.int32 and buffer.shape == ((3 + units) * size + 2 * num_samples,)
    rows, sampled, slots = naive(step.chunks, block_size, units)
    rows += [(NULL_SLOT, 0, 0, *[-1] * units)] * spare
    for part, wanted in enumerate(zip(*rows, strict=True)):
        assert tuple(buffer[part * size : (part + 1) * size]) == wanted
    assert buffer[(3 + units) * size :].tolist() == (
        sampled + [size] * spare_samples + slots + [NULL_SLOT] * spare_samples)

    parts = unpack_step(buffer, size, units)  # type: ignore[arg-type]
    found = zip(parts.slot, parts.position, parts.token_id, *parts.new_block, strict=True)
    assert [tuple(map(int, row)) for row in found] == rows
    assert list(parts.sample_row) == sampled + [size] * spare_samples
    assert list(parts.sample_slot) == slots + [NULL_SLOT] * spare_samples


def one_piece() -> SchedulerOutput:
    return _step([ScheduledChunk("r", 0, 0, (1, 2), 2, 1, ((3,),))])


def test_the_buffer_is_frozen_and_each_step_has_its_own() -> None:
    """The device may read its memory for as long as the step runs."""
    first, second = (pad_step(one_piece(), size=4, num_samples=1, null_slot=9, block_size=16) for _ in range(2))
    assert not np.may_share_memory(first, second)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    assert first.base is None, "no other array can write to the memory"


def test_a_step_that_does_not_fit_is_noticed() -> None:
    with pytest.raises(AssertionError, match="2 tokens do not fit a step of 1"):
        pad_step(one_piece(), size=1, num_samples=1, null_slot=9, block_size=16)
    with pytest.raises(AssertionError, match="1 sampled rows do not fit 0"):
        pad_step(one_piece(), size=2, num_samples=0, null_slot=9, block_size=16)
