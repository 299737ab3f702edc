"""GET /engine/state: the state of every KV block, and the activity of the engine."""

import itertools
import time
from typing import Any

from jaxpaged.core.messages import EngineInfo, PoolState
from jaxpaged.frontend.metrics import Metrics


def engine_state(name: str, info: EngineInfo, pool: PoolState, metrics: Metrics) -> dict[str, Any]:
    """The JSON of the route, for the model served under this name.

    `blocks.runs` holds the codes of `PoolState`, each run of equal ones as its length and the code: "12f3o"; with
    several KV groups, `blocks.group_runs` holds the letter of each block's group in the same way. `blocks.groups` lists
    each group's window, null for all tokens, whether it keeps a state instead, and the number of blocks it uses.
    Counts are totals since the start: whoever asks twice divides their difference by that of `time`, in seconds.
    """
    counts = {kind: pool.state_codes.count(code)
              for code, kind in (("f", "free"), ("o", "owned"), ("s", "shared"), ("c", "cached"))}
    used = [counts["owned"] + counts["shared"]]
    if pool.group_codes:
        used = [pool.group_codes.count(chr(ord("a") + index)) for index in range(len(info.kv_groups))]
    groups = [{"window": group.window, "state": group.save_every > 0, "units_per_block": group.width, "used": number}
              for group, number in zip(info.kv_groups, used, strict=True)]
    return {
        "time": time.monotonic(),
        "model": {"name": name, "architecture": info.architecture, "device": info.device, "dtype": info.dtype,
                  "max_model_len": info.max_model_len},
        "blocks": {"size": info.block_size, "total": len(pool.state_codes), **counts, "swapped": pool.swapped,
                   "runs": run_lengths(pool.state_codes), "group_runs": run_lengths(pool.group_codes),
                   "groups": groups},
        "limits": {"running": info.max_num_seqs},
        **metrics.activity(),
    }


def run_lengths(state_codes: str) -> str:
    """Runs of equal codes, each as its length and the code."""
    return "".join(f"{sum(1 for _ in run)}{code}" for code, run in itertools.groupby(state_codes))
