"""The sizes that fix every program: steps are padded to one of a few."""

from dataclasses import dataclass

from jaxpaged.execution.logprobs import NUM_TOP

ProgramName = tuple[str, int]

SCORED_ROWS = 64  # of one `prompt_logprobs` or `hidden` program: logits of a whole step would take gigabytes
ADMIT_SIZES = (1, 8)
TABLE_ROWS = 8
COPY_BLOCKS = 8
TRANSFER_SIZES = {"cpu": (8, 1), "cuda": (64, 8, 1)}  # blocks that one program moves to host memory or back


def step_sizes(max_num_batched_tokens: int, platform: str) -> tuple[int, ...]:
    """Ascending token counts that a step is padded to; none is above the budget.

    On CPU a step of 2 rows is no slower than one of 1, and 8 hardly slower than 4: fewer programs start faster.
    """
    small = (2, 8) if platform == "cpu" else (1, 2, 4, 8)
    sizes = [size for size in small if size <= max_num_batched_tokens]
    size = 16
    while size < max_num_batched_tokens:
        sizes.append(size)
        size *= 2
    return tuple(sorted({*sizes, max_num_batched_tokens}))


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that fix every program.

    Attributes:
        sizes: see `step_sizes`.
        max_num_seqs: slots; the device keeps one more, the null slot of padding rows.
        table_width: columns of the block table.
        num_top: alternatives of each log probability.
        processed_logprobs: see `sample_full`.
        embeddings: whether there is a program for them.
        transfer_sizes: numbers of blocks that move to host memory or back at once; none where nothing moves there.
    """

    sizes: tuple[int, ...]
    max_num_seqs: int
    table_width: int
    block_size: int
    num_blocks: int
    num_top: int = NUM_TOP
    processed_logprobs: bool = False
    embeddings: bool = False
    transfer_sizes: tuple[int, ...] = ()

    def samples_of(self, size: int) -> int:
        """Sampled rows of a step of `size` tokens."""
        return min(size, self.max_num_seqs)

    def sample_sizes(self) -> tuple[int, ...]:
        """Descending numbers of sampled rows that steps are padded to."""
        return tuple(sorted({self.samples_of(size) for size in self.sizes}, reverse=True))

    def size_for(self, tokens: int, samples: int = 0) -> int:
        """The smallest size that holds `tokens` tokens and `samples` sampled rows."""
        return next(size for size in self.sizes if size >= tokens and self.samples_of(size) >= samples)
