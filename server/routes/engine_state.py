"""GET /engine/state: the state of every KV block, and the activity of the engine."""

import itertools
import time
from typing import Any

from jaxpaged.core.messages import EngineInfo, PoolState
from jaxpaged.frontend.metrics import Metrics


def engine_state(name: str, info: EngineInfo, pool: PoolState, metrics: Metrics) -> dict[str, Any]:
    """The JSON of the route, for the model served under this name.

    `blocks.runs` holds the codes of `PoolState`, each run of equal ones as its length and the code: "12f3o".
    Counts are totals since the start: whoever asks twice divides their difference by that of `time`, in seconds.
    """
    counts = {kind: pool.state_codes.count(code)
              for code, kind in (("f", "free"), ("o", "owned"), ("s", "shared"), ("c", "cached"))}
    return {
        "time": time.monotonic(),
        "model": {"name": name, "architecture": info.architecture, "device": info.device, "dtype": info.dtype,
                  "max_model_len": info.max_model_len},
        "blocks": {"size": info.block_size, "total": len(pool.state_codes), **counts, "swapped": pool.swapped,
                   "runs": run_lengths(pool.state_codes)},
        "limits": {"running": info.max_num_seqs},
        **metrics.activity(),
    }


def run_lengths(state_codes: str) -> str:
    """Runs of equal codes, each as its length and the code."""
    return "".join(f"{sum(1 for _ in run)}{code}" for code, run in itertools.groupby(state_codes))
