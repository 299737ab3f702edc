"""The gated delta rule over ragged steps equals a recurrence in float64, however a sequence is cut."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.pallas_kernels.delta_rule import DeltaInputs, DeltaShape, delta_rule, make_state_tiles
from jaxpaged.pallas_kernels.kv_pages import KVPages
from jaxpaged.pallas_kernels.state_pages import read_state, units_for_state, write_state

SHAPE, WIDTH = DeltaShape(2, 4, 8, 6), 4
CHANNELS = 2 * 16 + 24
STATE = 3 * CHANNELS + 4 * 8 * 6
# XLA's CPU moves 16-bit numbers through float32, which makes a NaN another one.
QUIETED = (jnp.bfloat16, jnp.float16)
SLOTS, ROWS, TOKENS = 3, 80, 150
PAGE = (4, 2, 6)


def drawn(seed: int, count: int = TOKENS) -> dict[str, np.ndarray]:
    """What the tokens of a sequence bring; some decay nothing, some keys repeat."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((count, CHANNELS))
    mixed[10:40, 16:32] = mixed[10, 16:32]
    decay = -rng.exponential(0.3, (count, 4)) * rng.integers(0, 2, (count, 4))
    return {"mixed": mixed, "decay": decay, "beta": rng.random((count, 4))}


CONV = np.random.default_rng(9).standard_normal((CHANNELS, WIDTH)) / 2


def recurrence(inputs: dict[str, np.ndarray]) -> np.ndarray:
    """[T, Hv, dv] in float64, token by token, as the paper has it."""
    state, found = np.zeros((4, 8, 6)), []
    seen = np.concatenate([np.zeros((WIDTH - 1, CHANNELS)), inputs["mixed"]])
    for token in range(len(inputs["mixed"])):
        x = (seen[token : token + WIDTH] * CONV.T).sum(axis=0)
        x = x / (1 + np.exp(-x))
        q, k = (np.repeat(part.reshape(2, 8) / np.sqrt((part.reshape(2, 8) ** 2).sum(axis=1, keepdims=True) + 1e-6),
                          2, axis=0) for part in (x[:16], x[16:32]))
        state *= np.exp(inputs["decay"][token])[:, None, None]
        for head in range(4):
            error = x[32:].reshape(4, 6)[head] - k[head] @ state[head]
            state[head] += np.outer(k[head], inputs["beta"][token, head] * error)
        found.append(np.stack([q[head] * 8**-0.5 @ state[head] for head in range(4)]))
    return np.stack(found)


class Steps:
    """Steps over sequences whose states lie in pages of a dtype, in no order."""

    def __init__(self, dtype: Any = jnp.float32, tile: int = 64) -> None:
        units = units_for_state(STATE, int(np.prod(PAGE)), jnp.dtype(dtype).itemsize)
        order = np.random.default_rng(2).permutation(SLOTS * units).reshape(SLOTS, units) + 1
        self._table = np.concatenate([order, np.zeros((1, units), np.int64)]).astype(np.int32)
        pool = jnp.zeros((SLOTS * units + 1, *PAGE), dtype)
        self._pages = KVPages(pool, pool)

        @jax.jit
        def run(pages: KVPages, mixed: Any, decay: Any, beta: Any, slot: Any, position: Any) -> Any:
            return delta_rule(DeltaInputs(mixed, decay, beta), jnp.asarray(CONV, jnp.float32), pages,
                              jnp.asarray(self._table), slot, position, make_state_tiles(slot, SLOTS, tile), SHAPE)

        self._run = run

    def step(self, *chunks: tuple[int, int, dict[str, np.ndarray]]) -> list[np.ndarray]:
        """Chunks of (slot, position of the first token, its inputs): what each reads."""
        given = {name: np.full((ROWS, *part.shape[1:]), np.nan, np.float32) for name, part in chunks[0][2].items()}
        slot, position = np.full(ROWS, SLOTS, np.int32), np.zeros(ROWS, np.int32)
        first, bounds = 0, []
        for number, start, inputs in chunks:
            part = slice(first, first := first + len(inputs["mixed"]))
            for name, rows in inputs.items():
                given[name][part] = rows
            slot[part], position[part] = number, range(start, start + part.stop - part.start)
            bounds.append(part)
        y, self._pages = self._run(self._pages, *given.values(), slot, position)
        return [np.asarray(y)[part] for part in bounds]


def cut(inputs: dict[str, np.ndarray], start: int, end: int) -> dict[str, np.ndarray]:
    return {name: part[start:end] for name, part in inputs.items()}


@pytest.mark.parametrize(("dtype", "tile", "borders"), [
    (jnp.bfloat16, 64, [0, 1, 2, 5, 70, 71, 150]), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (jnp.float32, 7, [0, 40, 47, 48, 120, 150]), (jnp.float32, 64, [0, 64, 65, 130, 150]),
        (jnp.int8, 16, [0, 80, 150]), (jnp.float8_e4m3fn, 16, [0, 80, 150]),
        (jnp.float16, 64, [*range(31), 100, 150])))])
def test_sequences_cut_anywhere(dtype: Any, tile: int, borders: Sequence[int]) -> None:
    """Beside another sequence, which neither changes nor sees it, and rows of NaN as padding."""
    steps, one, other = Steps(dtype, tile), drawn(1), drawn(2)
    found, beside, at = [], [], 0
    for start, end in pairwise(borders):
        count = min(ROWS - (end - start), TOKENS - at, 3)
        chunks = [(0, start, cut(one, start, end)), (2, at, cut(other, at, at + count))][: 1 + (count > 0)]
        order = -1 if start % 2 else 1
        results = steps.step(*chunks[::order])[::order]
        found.append(results[0])
        beside += results[1:]
        at += count
    np.testing.assert_allclose(np.concatenate(found), recurrence(one), atol=2e-5)
    np.testing.assert_allclose(np.concatenate(beside), recurrence(other)[:at], atol=2e-5)


@pytest.mark.slow
def test_rows_do_not_depend_on_what_is_beside_them() -> None:
    """Bit by bit, for chunks and for single tokens, even beside numbers that are not finite."""
    one, other = drawn(1), drawn(2)
    bad = {name: np.full_like(part, np.nan) for name, part in cut(other, 0, 20).items()}
    alone, among = Steps(), Steps()
    for start, end in ((0, 30), (30, 31), (31, 33)):
        [wanted] = alone.step((0, start, cut(one, start, end)))
        results = among.step((1, 0, cut(other, 0, 11)), (0, start, cut(one, start, end)), (2, 0, bad))
        np.testing.assert_array_equal(results[1], wanted)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn])
def test_states_are_the_same_bits_in_pages_of_any_dtype(dtype: Any) -> None:
    """Whatever the bits would mean as numbers of the pages' dtype."""
    bits = np.random.default_rng(0).integers(0, 2**32, 500, dtype=np.uint64).astype(np.uint32)
    bits[:8] = [0x7F817F81, 0xFFA0FFA0, 0x7F7F7F7F, 0xFFFFFFFF, 0x80808080, 0x7C017C01, 0x00010001, 0]
    units = jnp.arange(1, 1 + units_for_state(500, int(np.prod(PAGE)), jnp.dtype(dtype).itemsize))
    pool = jnp.zeros((len(units) + 2, *PAGE), dtype)
    state = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32)
    pages = jax.jit(write_state)(KVPages(pool, pool), units, state)
    found = jax.jit(partial(read_state, size=500))(pages, units)
    read = np.asarray(jax.lax.bitcast_convert_type(found, jnp.uint32))
    if dtype in QUIETED:
        halves = bits.view(np.uint16)
        largest = 0x7F80 if dtype == jnp.bfloat16 else 0x7C00
        is_nan = ((halves & 0x7FFF) > largest)
        np.testing.assert_array_equal(read.view(np.uint16)[~is_nan], halves[~is_nan])
        changed = read[8:].view(np.float32).astype(np.float64) / bits[8:].view(np.float32) - 1
        assert np.nanmax(np.abs(changed)) < 2.0**-16
        return
    np.testing.assert_array_equal(read, bits)
