"""Engines of the tiny model, and a loop that serves requests to their end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.messages import EngineRequest
from jaxpaged.engine.engine import Engine
from tests.support.tiny_llama import ENGINE_ARGS

MakeEngine = Callable[..., Engine]
# So few that requests are preempted.
FEW_BLOCKS: dict[str, Any] = {"max_num_batched_tokens": 7, "num_gpu_blocks_override": 10}


@contextmanager
def engines(path: Path) -> Iterator[MakeEngine]:
    """Makes engines of a model, with ENGINE_ARGS as far as nothing else is asked for; they end with the block."""
    made: list[Engine] = []

    def make(**changes: Any) -> Engine:
        made.append(Engine(EngineConfig.from_kwargs(model=str(path), **(ENGINE_ARGS | changes))))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def run(engine: Engine, requests: Sequence[EngineRequest]) -> tuple[dict[str, list[int]], int]:
    """Serve requests together, the bookkeeping checked after every step.

    Returns:
        Ids of each, and tokens computed.
    """
    ids: dict[str, list[int]] = {item.request_id: [] for item in requests}
    computed = 0
    for item in requests:
        engine.add_request(item)
    while engine.has_work():
        outputs = engine.step()
        engine.check_integrity()
        computed += sum(outputs.stats.step_tokens)
        for delta in outputs.deltas:
            ids[delta.request_id] += delta.token_ids
    assert engine.stats().blocks_used == 0
    return ids, computed
