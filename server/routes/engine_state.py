"""What GET /engine/state tells: the block pool, block by block, and what the engine is busy with."""

import itertools
import time
from typing import Any

from jaxpaged.core.messages import EngineInfo, PoolState
from jaxpaged.frontend.metrics import Metrics


def engine_state(name: str, info: EngineInfo, pool: PoolState, metrics: Metrics) -> dict[str, Any]:
    """The JSON of the route, for the model served under this name.

    `blocks.runs` holds the letters of `PoolState`, each run of equal ones as its length and the letter: "12f3o".
    Counts are totals since the start: whoever asks twice divides their difference by that of `time`, in seconds.
    """
    counts = {kind: pool.blocks.count(letter)
              for letter, kind in (("f", "free"), ("o", "owned"), ("s", "shared"), ("c", "cached"))}
    return {
        "time": time.monotonic(),
        "model": {"name": name, "architecture": info.architecture, "device": info.device, "dtype": info.dtype,
                  "max_model_len": info.max_model_len},
        "blocks": {"size": info.block_size, "total": len(pool.blocks), **counts, "swapped": pool.swapped,
                   "runs": run_lengths(pool.blocks)},
        "limits": {"running": info.max_num_seqs},
        **metrics.activity(),
    }


def run_lengths(letters: str) -> str:
    """Runs of equal letters, each as its length and the letter."""
    return "".join(f"{sum(1 for _ in run)}{letter}" for letter, run in itertools.groupby(letters))
