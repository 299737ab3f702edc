"""Tile sizes of the GPU kernels, one table per GPU generation.

Registers, spills and shared memory behind each choice come from compiling (`tests/execution/test_gpu_compile.py` checks
them on every run); no GPU has timed them yet.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """How a program of the attention kernel works.

    Attributes:
        rows: query rows (tokens times heads of a group) of a tile, ascending; a tile uses the first that it fits in.
        block: tokens of context per iteration.
        num_warps, num_stages: see `lowering.launch`.
        programs_per_sm: the number that fit one multiprocessor, by registers and shared memory.
        token_rows: minimum rows of a token in a tile; more than the heads of its group where rows can only
            be loaded in runs of this length.
        mosaic: the program is `mosaic_attention`'s.
    """

    rows: tuple[int, ...]
    block: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    token_rows: int = 0
    mosaic: bool = False


@dataclass(frozen=True, slots=True)
class AttentionTable:
    """A generation's tiles: for steps of few tokens, and for steps that can hold chunks of prompts."""

    few: AttentionTiles
    many: AttentionTiles


MANY_TOKENS = 32  # steps from this size on also have large tiles

# By generation and bytes per stored number. float32 is multiplied as such, without tensor cores: tiles of 64 rows would
# spill.
ATTENTION: dict[str, dict[int, AttentionTable]] = {
    "ampere": {
        1: AttentionTable(AttentionTiles((16,), 32, 8, 3, 2), AttentionTiles((16, 64), 32, 4, 3, 2)),
        2: AttentionTable(AttentionTiles((16,), 64, 4, 3, 2), AttentionTiles((16, 64), 32, 4, 3, 2)),
        4: AttentionTable(AttentionTiles((16,), 16, 4, 3, 3), AttentionTiles((16,), 16, 4, 3, 3)),
    },
    "ada": {
        1: AttentionTable(AttentionTiles((16,), 32, 8, 3, 2), AttentionTiles((16, 64), 32, 8, 3, 1)),
        2: AttentionTable(AttentionTiles((16,), 32, 4, 3, 2), AttentionTiles((16, 128), 32, 8, 3, 1)),
        4: AttentionTable(AttentionTiles((16,), 16, 8, 3, 2), AttentionTiles((16,), 16, 8, 3, 2)),
    },
    "hopper": {
        1: AttentionTable(AttentionTiles((16,), 32, 4, 3, 4), AttentionTiles((16, 64), 64, 4, 3, 2)),
        2: AttentionTable(AttentionTiles((16,), 64, 4, 3, 3), AttentionTiles((16, 64), 64, 4, 3, 2)),
        4: AttentionTable(AttentionTiles((16,), 16, 4, 3, 4), AttentionTiles((16,), 16, 4, 3, 4)),
    },
}


# Of float32 queries over pages of less: a pipeline of loads that are converted to float32 on their way spills, so other
# programs of the same multiprocessor have to fill the time of a load.
WIDENING = AttentionTiles((16,), 16, 8, 1, 3)

# Of `mosaic_attention`: one warp group, three blocks in shared memory, two of them under way.
MOSAIC = AttentionTiles((64,), 64, 4, 3, 1, token_rows=8, mosaic=True)


@dataclass(frozen=True, slots=True)
class CombineTiles:
    """A program that merges partial results: query rows, and warps; float32 and heads of more than 128 need many."""

    rows: int
    few_warps: int
    many_warps: int


COMBINE: dict[str, CombineTiles] = {
    generation: CombineTiles(16, 4, 8) for generation in ("ampere", "ada", "hopper")  # with few, the latter spill
}


@dataclass(frozen=True, slots=True)
class RotaryTiles:
    """A tile of `rotary_kv_write`: for steps of at most `max_tokens`, `rows` tokens and `num_warps` per program."""

    max_tokens: int
    rows: int
    num_warps: int


# Few tokens: many small programs, so that all multiprocessors take part. Many: tiles that share fewer launches.
ROTARY: dict[str, tuple[RotaryTiles, ...]] = {
    generation: (RotaryTiles(1024, 4, 1), RotaryTiles(2**31, 16, 4)) for generation in ("ampere", "ada", "hopper")
}


@dataclass(frozen=True, slots=True)
class SamplerTiles:
    """How a program of the sampler walks its row: `block` logits per iteration."""

    block: int
    num_warps: int


SAMPLER: dict[str, SamplerTiles] = {
    "ampere": SamplerTiles(4096, 8),
    "ada": SamplerTiles(4096, 8),
    "hopper": SamplerTiles(4096, 8),
}


@dataclass(frozen=True, slots=True)
class TopTokensTiles:
    """A run of columns that a program of `top_tokens` holds in registers."""

    block: int
    num_warps: int


TOP_TOKENS: dict[str, TopTokensTiles] = {
    generation: TopTokensTiles(2048, 4) for generation in ("ampere", "ada", "hopper")
}


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """A program of `packed_linear`: rows of x, columns of the weight, warps, and stages of its pipeline of loads."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


# By generation and kind of numbers, ascending in rows. With 256 columns x is read half as often as with 128; with more
# than 16 rows, registers would then leave Ampere and Ada a single program per multiprocessor.
_PACKED_8_BITS = (PackedTiles(16, 128, 4, 4), PackedTiles(32, 128, 4, 3), PackedTiles(64, 128, 4, 3))
_PACKED_4_BITS = (PackedTiles(16, 256, 8, 4), *_PACKED_8_BITS[1:])
_PACKED: dict[str, tuple[PackedTiles, ...]] = {"int4": _PACKED_4_BITS, "int8": _PACKED_8_BITS, "fp8": _PACKED_8_BITS}
# Ada's shared memory holds one program's loads of 8-bit numbers, or two with shorter pipelines.
_ADA_8_BITS = (PackedTiles(16, 128, 4, 3), PackedTiles(32, 128, 8, 3), PackedTiles(64, 128, 8, 3))
PACKED_LINEAR: dict[str, dict[str, tuple[PackedTiles, ...]]] = {
    "ampere": _PACKED,
    "ada": {"int4": _PACKED_4_BITS, "int8": _ADA_8_BITS, "fp8": _ADA_8_BITS},
    "hopper": _PACKED | {"int4": (PackedTiles(16, 256, 8, 4), PackedTiles(32, 256, 8, 3), PackedTiles(64, 256, 8, 3))},
}
# Of 64 rows, where groups are shorter than a block: scales and sums of several groups are in registers at once, and
# with half the warps they spill.
PACKED_SHORT_GROUPS = PackedTiles(64, 128, 8, 3)


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """A program of one grouped product: rows (ascending; a tile takes the first that holds it), columns, depth."""

    rows: tuple[int, ...]
    columns: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The tiles of both products of experts, of equally many rows."""

    gated: ProductTiles
    down: ProductTiles


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """A generation's tiles, by the rows that an expert gets.

    Attributes:
        few, many, most: up to 16 on average, up to 96, and more.
        narrow: in place of either of `few`, where there would be less than two waves of programs: as many bytes are
            under way, in twice the programs.
        wide: of float32, which is multiplied as such, without tensor cores.
    """

    few: ExpertTiles
    many: ExpertTiles
    most: ExpertTiles
    narrow: ProductTiles
    wide: ExpertTiles


_FEW = ExpertTiles(ProductTiles((16,), 64, 64, 4, 3), ProductTiles((16,), 64, 64, 4, 4))
_NARROW = ProductTiles((16,), 32, 128, 4, 3)
_WIDE = ExpertTiles(ProductTiles((16,), 32, 32, 4, 3), ProductTiles((16,), 32, 32, 4, 3))
_SHALLOW = ExpertTiles(ProductTiles((16, 64), 64, 32, 4, 3), ProductTiles((16, 64), 128, 32, 4, 3))
_DEEP = ExpertTiles(ProductTiles((16, 64), 64, 64, 4, 3), ProductTiles((16, 64), 128, 64, 4, 3))
_MOST = ProductTiles((16, 128), 128, 64, 8, 3)
EXPERT_PRODUCTS: dict[str, ExpertTable] = {
    "ampere": ExpertTable(_FEW, _SHALLOW, _SHALLOW, _NARROW, _WIDE),
    "ada": ExpertTable(_FEW, _SHALLOW, _SHALLOW, _NARROW, _WIDE),
    "hopper": ExpertTable(_FEW, _DEEP, ExpertTiles(_MOST, _MOST), _NARROW, _WIDE),
}


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """A program of `paged_latents`: rows, tokens of context per iteration; for the rest see `AttentionTiles`."""

    rows: int
    block: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True, slots=True)
class LatentTable:
    """A generation's tiles: for few heads in steps of few tokens, and for the others."""

    few: LatentTiles
    many: LatentTiles


LATENTS: dict[str, LatentTable] = {
    "ampere": LatentTable(LatentTiles(16, 16, 4, 4, 2), LatentTiles(32, 16, 4, 3, 2)),
    "ada": LatentTable(LatentTiles(16, 16, 4, 3, 1), LatentTiles(16, 16, 4, 3, 1)),
    "hopper": LatentTable(LatentTiles(16, 32, 4, 3, 2), LatentTiles(64, 32, 8, 3, 1)),
}
