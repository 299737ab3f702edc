"""Draw the next token of each row in one kernel, without sorting the vocabulary.

One program per row streams the row's logits, which a GPU's second-level cache holds, several times: for the maximum,
for the two cut-offs, for the draw. A cut-off is the bit pattern of a distance to the maximum, found two bits per pass:
the bits of floats from zero up are in the same order as the floats. The draw is the Gumbel-max trick (Gumbel, 1954)
over the same random numbers as `execution/sampler`, threefry of (seed, choice, position) and the token's index
(Salmon et al., 2011), so that both choose the same token unless two are within rounding of each other.

Rows name their slot, and the slot's parameters are read here: what would be a dozen small kernels is this one.

Axis letters: B rows, V vocabulary.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas_kernels.lowering import GpuTarget, launch, load
from jaxpaged.pallas_kernels.tiles import SAMPLER

FAILED = -1  # the id of a row whose logits are not finite
MIN_TOP_P = 1e-30  # the most probable token's mass is 1; a smaller top_p must not count as no cut
_BITS = 31  # of a float from zero up
_LARGEST = 2**_BITS - 1
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class SlotParameters(NamedTuple):
    """Sampling parameters of every slot; see `execution.sampler.SamplingState`."""

    temperature: jax.Array  # [slots] float32
    top_k: jax.Array  # [slots] int32
    top_p: jax.Array  # [slots] float32
    min_p: jax.Array  # [slots] float32
    seed: jax.Array  # [slots, 2] uint32
    choice: jax.Array  # [slots] int32


def sample(
    logits: jax.Array,  # [B, V] float32
    parameters: SlotParameters,
    slot: jax.Array,  # [B] int32, whose parameters a row has
    position: jax.Array,  # [B] int32, the sequence position that the new token will have
    last_id: jax.Array,  # [slots] int32
    *,
    target: GpuTarget,
) -> tuple[jax.Array, jax.Array]:
    """Ids [B] int32, FAILED where a row's logits are not finite, and `last_id` with them at their slots, at least 0."""
    ids, last_id = _launch(logits, parameters, slot, position, last_id, target, returns_lowest=False)
    return ids, last_id


def sample_with_cutoff(
    logits: jax.Array,  # [B, V] float32
    parameters: SlotParameters,
    slot: jax.Array,  # [B] int32
    position: jax.Array,  # [B] int32
    last_id: jax.Array,  # [slots] int32
    *,
    target: GpuTarget,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `sample`, and the lowest logit [B] float32 that a row was drawn from; minus infinity for greedy rows."""
    ids, last_id, lowest = _launch(logits, parameters, slot, position, last_id, target, returns_lowest=True)
    return ids, last_id, lowest


def _launch(
    logits: jax.Array, parameters: SlotParameters, slot: jax.Array, position: jax.Array, last_id: jax.Array,
    target: GpuTarget, *, returns_lowest: bool,
) -> tuple[jax.Array, ...]:
    rows, vocab = logits.shape
    assert logits.dtype == jnp.float32 and slot.shape == position.shape == (rows,), (logits, slot, position)
    tiles = SAMPLER[target.generation]
    block = min(tiles.block, max(16, 1 << (vocab - 1).bit_length()))
    outputs = [jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct(last_id.shape, jnp.int32)]
    outputs += [jax.ShapeDtypeStruct((rows,), jnp.float32)] * returns_lowest
    return tuple(launch(
        partial(_kernel, block=block),
        logits, *parameters, slot, position, last_id,
        name="sampler",
        grid=(rows,),
        out_shape=outputs,
        aliases={9: 1},
        num_warps=tiles.num_warps,
        interpret=target.interpret,
    ))


def _kernel(
    logits_ref: Any,  # [B, V]
    temperature_ref: Any,  # [slots]
    top_k_ref: Any,  # [slots]
    top_p_ref: Any,  # [slots]
    min_p_ref: Any,  # [slots]
    seed_ref: Any,  # [slots, 2]
    choice_ref: Any,  # [slots]
    slot_ref: Any,  # [B]
    position_ref: Any,  # [B]
    _: Any,  # [slots], the memory of last_id_ref
    ids_ref: Any,  # [B]
    last_id_ref: Any,  # [slots]
    lowest_ref: Any = None,  # [B]
    *,
    block: int,
) -> None:
    row, vocab = pl.program_id(0), logits_ref.shape[1]
    trips = pl.cdiv(vocab, block)
    lanes = jnp.arange(block)
    slot = slot_ref[row]
    temperature = temperature_ref[slot]
    drawing = temperature > 0
    divisor = jnp.where(drawing, temperature, 1.0)

    def read(step: Any) -> tuple[jax.Array, jax.Array]:
        """Index and logit; past the vocabulary, minus infinity."""
        index = step * block + lanes
        return index, load(logits_ref.at[row, index], index < vocab, -jnp.inf)

    # NaN, which maxima may pass over, shows as infinity.
    def find_highest(step: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, logit = read(step)
        return _keep_better(*carry, jnp.where(logit != logit, jnp.inf, logit), index)

    highest, greedy = _best(lax.fori_loop(0, trips, find_highest, _nothing(block)), vocab)

    def distances(step: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Index, logit relative to the highest over temperature, and how far that is away, as an integer."""
        index, logit = read(step)
        relative = (logit - highest) / divisor
        return index, relative, _bits(relative)

    # Everything at most as far away as `limit` stays; ties at a cut-off all stay.
    min_p = min_p_ref[slot]
    limit = jnp.where(min_p > 0, _bits(jnp.log(jnp.where(min_p > 0, min_p, 1.0))), _LARGEST)

    def weights_up_to(bounds: tuple[jax.Array, ...], by_mass: bool) -> tuple[jax.Array, ...]:
        """For each bound, the number of tokens nearer to the highest; or, of those that survive so far, their mass."""
        def add(step: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            _, relative, far = distances(step)
            weight = jnp.where(far <= limit, jnp.exp(relative), 0.0) if by_mass else jnp.ones_like(relative)
            return tuple(sums + jnp.where(far < bound, weight, 0.0) for sums, bound in zip(carry, bounds, strict=True))

        return tuple(jnp.sum(total) for total in lax.fori_loop(
            0, trips, add, (jnp.zeros(block, jnp.float32),) * len(bounds)))

    def cut(active: jax.Array, wanted: jax.Array, by_mass: bool) -> jax.Array:
        """The smallest limit up to which the weights reach `wanted`."""
        def narrow(step: Any, found: jax.Array) -> jax.Array:
            unit = jnp.int32(1) << (_BITS - 1 - 2 * step)
            # Bits 30, 29 then 28, 27 and so on; the last pass has one bit left, and its upper bounds repeat it.
            unit = jnp.where(step == _BITS // 2, 1, unit >> 1)
            bounds = tuple(jnp.minimum(found, _LARGEST - digit * unit) + digit * unit for digit in (1, 2, 3))
            for bound, total in zip(bounds, weights_up_to(bounds, by_mass), strict=True):
                found = jnp.where(total < wanted, bound, found)
            return found

        return lax.fori_loop(0, _trips(active, _BITS // 2 + 1), narrow, jnp.int32(0))

    top_k = top_k_ref[slot]
    cuts_k = drawing & (top_k > 0) & (top_k < vocab)
    nearest = cut(cuts_k, top_k.astype(jnp.float32), by_mass=False)
    limit = jnp.where(cuts_k, jnp.minimum(limit, nearest), limit)

    top_p = top_p_ref[slot]
    cuts_p = drawing & (top_p < 1)

    def add_mass(step: Any, total: jax.Array) -> jax.Array:
        _, relative, far = distances(step)
        return total + jnp.where(far <= limit, jnp.exp(relative), 0.0)

    mass = jnp.sum(lax.fori_loop(0, _trips(cuts_p, trips), add_mass, jnp.zeros(block, jnp.float32)))
    nearest = cut(cuts_p, jnp.maximum(top_p, MIN_TOP_P) * mass, by_mass=True)
    limit = jnp.where(cuts_p, jnp.minimum(limit, nearest), limit)

    key = seed_ref[slot, 0], seed_ref[slot, 1]
    for number in (choice_ref[slot], position_ref[row]):
        key = _threefry(*key, jnp.uint32(0), number.astype(jnp.uint32))

    def draw(step: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, relative, far = distances(step)
        perturbed = jnp.where((far <= limit) & (index < vocab), relative + _gumbel(key, index), -jnp.inf)
        return _keep_better(*carry, perturbed, index)

    drawn = _best(lax.fori_loop(0, _trips(drawing, trips), draw, _nothing(block)), vocab)[1]
    if lowest_ref is not None:
        def find_lowest(step: Any, lowest: jax.Array) -> jax.Array:
            _, _, far = distances(step)
            return jnp.minimum(lowest, jnp.where(far <= limit, read(step)[1], jnp.inf))

        lowest = lax.fori_loop(0, _trips(drawing, trips), find_lowest, jnp.full(block, jnp.inf, jnp.float32))
        lowest_ref[row] = jnp.where(drawing, jnp.min(lowest), -jnp.inf)

    token = jnp.where(drawing, drawn, greedy)
    finite = (highest < jnp.inf) & (highest > -jnp.inf)
    ids_ref[row] = jnp.where(finite, token, FAILED)
    last_id_ref[slot] = jnp.where(finite, token, 0)


def _trips(wanted: jax.Array, count: int) -> jax.Array:
    """`count` or none; typed, since Triton's lowering takes a bound that is chosen from plain numbers for a bool."""
    return jnp.where(wanted, jnp.int32(count), jnp.int32(0))


def _nothing(block: int) -> tuple[jax.Array, jax.Array]:
    return jnp.full(block, -jnp.inf, jnp.float32), jnp.zeros(block, jnp.int32)


def _keep_better(best: jax.Array, index_of_best: jax.Array, value: jax.Array, index: jax.Array) -> tuple[
    jax.Array, jax.Array
]:
    """Lane by lane; of equals the first stays."""
    return jnp.maximum(best, value), jnp.where(value > best, index, index_of_best)


def _best(lanes: tuple[jax.Array, jax.Array], vocab: int) -> tuple[jax.Array, jax.Array]:
    """The best of all lanes and its index; of equals the first."""
    best = jnp.max(lanes[0])
    return best, jnp.min(jnp.where(lanes[0] == best, lanes[1], vocab - 1))


def _bits(distance: jax.Array) -> jax.Array:
    """int32 numbers in the same order as the magnitudes of float32 values."""
    return lax.bitcast_convert_type(jnp.abs(distance), jnp.int32)


def _gumbel(key: tuple[jax.Array, jax.Array], index: jax.Array) -> jax.Array:
    high, low = _threefry(*key, jnp.zeros_like(index).astype(jnp.uint32), index.astype(jnp.uint32))
    mantissa = (high ^ low) >> 9 | jnp.uint32(0x3F800000)  # a float32 from 1 to 2
    uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))


def _threefry(key0: jax.Array, key1: jax.Array, count0: jax.Array, count1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011)."""
    keys = key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA)
    x, y = count0 + keys[0], count1 + keys[1]
    for turn in range(5):
        for distance in _ROTATIONS[turn % 2]:
            x = x + y
            y = (y << distance | y >> (32 - distance)) ^ x
        x, y = x + keys[(turn + 1) % 3], y + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return x, y
