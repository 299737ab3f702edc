"""The host side of one step: every array that the device needs, padded to the step's size.

All of it is one int32 buffer, so that a step costs one transfer. On CPU the device reads the very memory of the numpy
array, so each step gets a fresh buffer that is frozen once it is filled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxpaged.scheduling.scheduler_output import SchedulerOutput

IN_FLIGHT = -1  # token id that is not known on the host: the device takes the slot's last id


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step's buffer holds; padding rows have the null slot and position 0.

    Attributes:
        slot: [T] slot of each token.
        position: [T] place of the token in its sequence.
        token_id: [T] id, or IN_FLIGHT.
        new_block: [T] block that begins with this token, or -1 where the token begins none.
        sample_row: [B] rows to sample after; T in padding.
        sample_slot: [B] the slots whose next tokens they are; several may sample after one row.
    """

    slot: jax.Array
    position: jax.Array
    token_id: jax.Array
    new_block: jax.Array
    sample_row: jax.Array
    sample_slot: jax.Array


def pad_step(step: SchedulerOutput, *, size: int, num_samples: int, null_slot: int, block_size: int) -> np.ndarray:
    """Pad a step to `size` token rows and `num_samples` sampled rows.

    Returns:
        int32 [4 * size + 2 * num_samples], read-only; see `StepRows` for the parts, in that order.
    """
    assert step.num_tokens <= size, f"{step.num_tokens} tokens do not fit a step of {size}"
    buffer = np.empty(4 * size + 2 * num_samples, np.int32)
    slot, position, token_id, new_block = buffer[: 4 * size].reshape(4, size)
    slot[:] = null_slot
    position[:] = 0
    token_id[:] = 0
    new_block[:] = -1
    sample_row: list[int] = []
    sample_slot: list[int] = []
    singles: list[tuple[int, int, int, int]] = []  # written at once: a write into an array costs more than the rest
    row = 0
    for piece in step.pieces:
        ids, count, start = piece.token_ids, piece.num_tokens, piece.start
        end = row + count
        if count == 1:
            singles.append((row, piece.slot, start, ids[0] if ids else IN_FLIGHT))
        else:
            slot[row:end] = piece.slot
            position[row:end] = np.arange(start, start + count)
            token_id[row : row + len(ids)] = ids
            token_id[row + len(ids) : end] = IN_FLIGHT
        for index, block in enumerate(piece.blocks):
            new_block[row + (-start) % block_size + index * block_size] = block
        if piece.samples:
            sample_row.append(end - 1)
            sample_slot.append(piece.slot)
        row = end
    if singles:
        rows, *columns = np.array(singles, np.int32).T
        slot[rows], position[rows], token_id[rows] = columns
    buffer[4 * size :] = [*_padded(sample_row, num_samples, size), *_padded(sample_slot, num_samples, null_slot)]
    buffer.flags.writeable = False
    return buffer


def unpack_step(buffer: jax.Array, size: int) -> StepRows:
    """The parts of a buffer from `pad_step`, on the device."""
    slot, position, token_id, new_block = buffer[: 4 * size].reshape(4, size)
    sample_row, sample_slot = buffer[4 * size :].reshape(2, -1)
    return StepRows(slot, position, token_id, new_block, sample_row, sample_slot)


def _padded(values: Sequence[int], length: int, filler: int) -> list[int]:
    assert len(values) <= length, f"{len(values)} sampled rows do not fit {length}"
    return [*values, *[filler] * (length - len(values))]
