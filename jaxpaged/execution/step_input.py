"""The host side of one step: every array that the device needs, padded to the step's size.

All of it is one int32 buffer, so that a step costs one transfer. On CPU the device reads the numpy array's own
memory, so each step gets a fresh buffer that becomes read-only once it is filled.
"""

from dataclasses import dataclass
from itertools import chain

import jax
import numpy as np

from jaxpaged.scheduling.scheduler_output import SchedulerOutput

IN_FLIGHT = -1  # token id that is not known on the host: the device uses the slot's last id


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step's buffer holds; padding rows have the null slot and position 0.

    Attributes:
        slot: [T] slot of each token.
        position: [T] index of the token in its sequence.
        token_id: [T] id, or IN_FLIGHT.
        new_block: [U, T] units of the block that begins with this token, of all KV groups; -1 where none begins.
        sample_row: [B] rows to sample after; T in padding.
        sample_slot: [B] slots that the sampled tokens belong to; several may sample after one row.
    """

    slot: jax.Array
    position: jax.Array
    token_id: jax.Array
    new_block: jax.Array
    sample_row: jax.Array
    sample_slot: jax.Array


def pad_step(step: SchedulerOutput, *, size: int, num_samples: int, null_slot: int, block_size: int,
             units: int = 1) -> np.ndarray:
    """Pad a step to `size` token rows and `num_samples` sampled rows.

    Args:
        units: U, units of a block in every KV group.

    Returns:
        int32 [(3 + U) * size + 2 * num_samples], read-only; see `StepRows` for the parts, in that order.
    """
    assert step.num_tokens <= size, f"{step.num_tokens} tokens do not fit a step of {size}"
    # Column by column: a loop over the chunks in Python, hundreds in a step, would take longer than all of this.
    _, slots, starts, token_ids, counts, num_samples_of, blocks, *_ = zip(*step.chunks, strict=True)
    num_tokens = np.array(counts, np.int32)
    end = np.cumsum(num_tokens, dtype=np.int32)
    begin = end - num_tokens
    start = np.array(starts, np.int32)
    slot_of = np.array(slots, np.int32)
    sampled = np.array(num_samples_of, np.int32)

    end_rows = (3 + units) * size
    buffer = np.empty(end_rows + 2 * num_samples, np.int32)
    slot, position, token_id, *new_block = buffer[:end_rows].reshape(-1, size)
    used = step.num_tokens
    slot[:used] = np.repeat(slot_of, num_tokens)
    slot[used:] = null_slot
    position[:used] = np.arange(used, dtype=np.int32) + np.repeat(start - begin, num_tokens)
    position[used:] = 0
    token_id[:used] = IN_FLIGHT
    token_id[used:] = 0
    ids = list(chain.from_iterable(token_ids))
    if ids:
        known = begin + np.fromiter(map(len, token_ids), np.int32, len(token_ids))
        token_id[:used][np.arange(used) < np.repeat(known, num_tokens)] = ids
    buffer[3 * size : end_rows] = -1
    for row, first, taken in zip(begin.tolist(), starts, blocks, strict=True):
        if taken:
            row += -first % block_size
            for target, unit in zip(new_block, taken, strict=True):
                target[row : row + len(unit) * block_size : block_size] = unit

    rows = np.repeat(end - np.cumsum(sampled, dtype=np.int32), sampled)  # of each chunk its last rows
    rows += np.arange(len(rows), dtype=np.int32)
    assert len(rows) <= num_samples, f"{len(rows)} sampled rows do not fit {num_samples}"
    sample_row, sample_slot = buffer[end_rows:].reshape(2, num_samples)
    sample_row[: len(rows)] = rows
    sample_row[len(rows) :] = size
    sample_slot[: len(rows)] = np.repeat(slot_of, sampled)
    sample_slot[len(rows) :] = null_slot
    buffer.flags.writeable = False
    return buffer


def unpack_step(buffer: jax.Array, size: int, units: int) -> StepRows:
    """The parts of a buffer from `pad_step`, on the device."""
    rows = buffer[: (3 + units) * size].reshape(3 + units, size)
    sample_row, sample_slot = buffer[(3 + units) * size :].reshape(2, -1)
    return StepRows(rows[0], rows[1], rows[2], rows[3:], sample_row, sample_slot)
