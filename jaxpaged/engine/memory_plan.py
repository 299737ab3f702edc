"""The number of KV blocks that a device holds: a pure function of the model, the flags and the device's description."""

from dataclasses import dataclass

from jaxpaged.core.config import DEFAULT_MEMORY_SHARE
from jaxpaged.core.kv_groups import UNBOUNDED, KVGroup, max_tokens, units_for
from jaxpaged.models.config import AnyMLPSpec, ExpertsSpec, ModelConfig

GIB = 2**30
CPU_POOL_BYTES = 2 * GIB
RESERVE_BYTES = GIB // 2  # the runtime's own buffers, inputs and outputs of the steps in flight, fragmentation
BLOCK_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use on each of `num_devices` devices, and the number of blocks that follows.

    Attributes:
        memory_bytes: the device's total memory, or what the process may use on CPU.
        allowed_bytes: the share of it that may be used.
        block_bytes: one device's part of one unit of the pool, keys and values.
        num_blocks: units; with one KV group, blocks.
        kv_bytes_per_token: of all layers and KV heads, over all devices.
        groups: KV groups of the model.
        max_chunk: maximum number of tokens of a request in one step.
    """

    num_devices: int
    memory_bytes: int
    allowed_bytes: int
    weight_bytes: int
    temporary_bytes: int
    reserve_bytes: int
    block_size: int
    block_bytes: int
    num_blocks: int
    kv_bytes_per_token: int
    groups: tuple[KVGroup, ...] = (KVGroup(),)
    max_chunk: int = 1

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def needed_bytes(self) -> int:
        """Everything together."""
        return self.weight_bytes + self.temporary_bytes + self.reserve_bytes + self.pool_bytes

    @property
    def fits(self) -> bool:
        """Whether there is room for two blocks, the null block included, within the allowed memory."""
        return self.num_blocks >= 2 and self.needed_bytes <= self.allowed_bytes

    @property
    def tokens(self) -> int:
        """Tokens of the longest request that fits the pool; the null block holds none."""
        return max_tokens(self.groups, max(self.num_blocks - 1, 0), self.block_size, self.max_chunk)

    def concurrent(self, length: int) -> int:
        """Requests of `length` tokens that fit at once."""
        return max(self.num_blocks - 1, 0) // units_for(self.groups, length, self.block_size, max_chunk=1)

    def lines(self, device: str, lengths: tuple[int, ...]) -> list[str]:
        """The plan as text, with the number of concurrent requests of each of these lengths."""
        each = "" if self.num_devices == 1 else f", on each of {self.num_devices} devices"
        requests = ", ".join(f"{self.concurrent(length):,} of {length:,}" for length in lengths)
        return [
            f"memory of {device}{each}: {size_text(self.allowed_bytes)} of {size_text(self.memory_bytes)} may be used",
            f"  weights {size_text(self.weight_bytes)}, temporaries {size_text(self.temporary_bytes)}, reserve "
            f"{size_text(self.reserve_bytes)}, KV pool {size_text(self.pool_bytes)}",
            f"  KV pool: {self.num_blocks:,} blocks of {self.block_size} tokens, {self.kv_bytes_per_token:,} bytes per "
            f"token{' over all devices' if self.num_devices > 1 else ''}, {tokens_text(self.tokens)}",
            *self._group_lines(),
            f"  requests at once, by tokens: {requests}",
        ]


    def _group_lines(self) -> list[str]:
        """What each KV group keeps, where there are several or windows."""
        if self.groups == (KVGroup(),):
            return []
        kept = "; ".join(
            f"a state of {group.width:,} units per request, and copies for shared prefixes at most every "
            f"{group.save_every * self.block_size:,} tokens" if group.save_every else
            f"{'all tokens' if group.window is None else f'a window of {group.window:,}'} in "
            f"{group.width} unit{'s' if group.width > 1 else ''} per block" for group in self.groups)
        return [f"  KV groups keep {kept}"]


def plan_memory(
    *,
    num_devices: int = 1,
    memory_bytes: int,
    weight_bytes: int,
    temporary_bytes: int,
    block_size: int,
    block_bytes: int,
    kv_bytes_per_token: int,
    on_cpu: bool,
    share: float | None,
    pool_bytes: int | None,
    num_blocks: int | None,
    groups: tuple[KVGroup, ...] = (KVGroup(),),
    max_chunk: int = 1,
) -> MemoryPlan:
    """Plan the pool; all bytes are those of one device, apart from `kv_bytes_per_token`.

    On CPU the pools of all devices together are min(2 GiB, a quarter of the memory), unless a flag says otherwise.

    Args:
        temporary_bytes: of the largest step.
        share, pool_bytes, num_blocks: the flags; the last given one wins.

    Returns:
        A plan that may not fit; see `MemoryPlan.fits`.
    """
    # A size that a flag names, or the CPU's fixed size, may use all of the memory.
    by_share = num_blocks is None and pool_bytes is None and not (on_cpu and share is None)
    allowed = int(memory_bytes * (share or DEFAULT_MEMORY_SHARE)) if by_share else memory_bytes
    reserve = RESERVE_BYTES if by_share else 0
    if num_blocks is None:
        if by_share:
            pool_bytes = allowed - weight_bytes - temporary_bytes - reserve
        elif pool_bytes is None:
            pool_bytes = min(CPU_POOL_BYTES // num_devices, memory_bytes // 4)
        count = max(pool_bytes or 0, 0) // block_bytes
        num_blocks = count // BLOCK_MULTIPLE * BLOCK_MULTIPLE or count
    return MemoryPlan(num_devices, memory_bytes, allowed, weight_bytes, temporary_bytes, reserve, block_size,
                      block_bytes, num_blocks, kv_bytes_per_token, groups, max_chunk)


def refusal(plan: MemoryPlan, remedies: list[str]) -> str:
    """Why a plan that does not fit is refused, with the numbers and the flags that would help."""
    each = "" if plan.num_devices == 1 else f" on each of {plan.num_devices} devices"
    return (
        f"the model does not fit{each}: weights {size_text(plan.weight_bytes)}, temporaries "
        f"{size_text(plan.temporary_bytes)}, reserve {size_text(plan.reserve_bytes)}, KV pool "
        f"{size_text(plan.pool_bytes)} ({plan.num_blocks:,} blocks of {size_text(plan.block_bytes)}; at least 2 are "
        f"needed); {size_text(plan.allowed_bytes)} of {size_text(plan.memory_bytes)} may be used. "
        f"What would help: {'; '.join(remedies)}"
    )


def temporary_bound(config: ModelConfig, *, num_devices: int, tokens: int, samples: int, itemsize: int) -> int:
    """Upper bound on the bytes of the largest step's temporaries on each device, where none is compiled.

    What a layer and the sampler hold at once: residual, norm, queries, keys and values before and after their
    rotation in float32, attention's output, three MLP activations, those of each of a token's experts with what each
    adds, and eight arrays of logits. The tests compare it with compiled steps.
    """
    heads = -(-max(spec.num_heads for spec in config.attention) // num_devices) + \
        2 * -(-config.num_kv_heads // min(num_devices, config.num_kv_heads))
    mlp = max(_mlp_numbers(spec, config.model_dim, num_devices) for spec in {layer.mlp for layer in config.layers})
    mixers = 4 * heads * config.head_dim
    # The inputs of a state's layer as such, in float32, and padded; and a few copies of one state.
    states = [-(-(spec.channels + 2 * spec.values) // num_devices) for spec in config.states]
    row = 4 * config.model_dim * (itemsize + 4) + max([mixers, *(4 * numbers for numbers in states)]) * (
        itemsize + 4) + mlp * (itemsize + 4)
    return tokens * row + 8 * 4 * samples * -(-config.vocab_size // num_devices) + 2**26


def _mlp_numbers(spec: AnyMLPSpec, model_dim: int, num_devices: int) -> int:
    """Activations of a token that are held at once."""
    each = 3 * -(-spec.dim // num_devices)
    if not isinstance(spec, ExpertsSpec):
        return each
    return spec.routing.top_k * (each + 2 * model_dim) + 3 * -(-spec.shared_dim // num_devices) + 4 * spec.count


def tokens_text(tokens: int) -> str:
    """The length of the longest request, as text; says so where windows alone have to fit."""
    return f"{tokens:,} tokens" if tokens < UNBOUNDED // 2 else "requests of any length"


def size_text(size: int) -> str:
    """Bytes as text."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"
