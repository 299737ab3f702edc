"""How many KV blocks a device holds: a pure function of the model, the flags and the device's description."""

from dataclasses import dataclass

from jaxpaged.errors import ConfigError

GIB = 2**30
CPU_POOL_BYTES = 2 * GIB
RESERVE_BYTES = GIB // 2  # the runtime's own buffers, logits in flight, fragmentation
BLOCK_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use, and the number of blocks that follows."""

    num_blocks: int
    block_bytes: int
    weight_bytes: int
    temporary_bytes: int
    memory_bytes: int

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def plan_memory(
    *,
    memory_bytes: int,
    weight_bytes: int,
    temporary_bytes: int,
    block_bytes: int,
    on_cpu: bool,
    share: float | None,
    pool_bytes: int | None,
    num_blocks: int | None,
) -> MemoryPlan:
    """Plan the pool.

    Args:
        memory_bytes: the device's total memory, or what the process may use on CPU.
        temporary_bytes: of the largest step.
        block_bytes: one block in all layers.
        share, pool_bytes, num_blocks: the flags; the last one given decides.

    Raises:
        ConfigError: not even two blocks fit; the text has the numbers and the flags that help.
    """
    if num_blocks is None:
        if pool_bytes is None:
            if on_cpu and share is None:
                pool_bytes = min(CPU_POOL_BYTES, memory_bytes // 4)
            else:
                pool_bytes = int(memory_bytes * (share or 0.9)) - weight_bytes - temporary_bytes - RESERVE_BYTES
        count = max(pool_bytes, 0) // block_bytes
        num_blocks = count // BLOCK_MULTIPLE * BLOCK_MULTIPLE or count
    plan = MemoryPlan(num_blocks, block_bytes, weight_bytes, temporary_bytes, memory_bytes)
    needed = weight_bytes + temporary_bytes + plan.pool_bytes
    if num_blocks < 2 or needed > memory_bytes:
        raise ConfigError(
            f"the model does not fit: weights {_mib(weight_bytes)}, temporaries {_mib(temporary_bytes)}, KV pool "
            f"{_mib(plan.pool_bytes)} ({num_blocks} blocks of {_mib(block_bytes)}), memory {_mib(memory_bytes)}; "
            "change --gpu-memory-utilization, --kv-cache-memory-bytes, --num-gpu-blocks-override or "
            "--max-num-batched-tokens"
        )
    return plan


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
