"""How the tests are shared out between processes, and what each room costs: a plugin of pytest.

Files are the units of work, the longest first, so that all processes end at about the same time. Every run ends with a
table of the seconds that each room took.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Files that start first, the longest first; all others take seconds. The first compiles the default model for all.
LONGEST = (
    "server/test_server.py",
    "models/test_models.py",
    "server/test_server_life.py",
    "docs/test_commands.py",
    "engine/test_engine.py",
    "execution/test_gpu_compile.py",
    "execution/test_aot_programs.py",
    "engine/test_tensor_parallel.py",
    "pallas_kernels/test_paged_attention.py",
    "commands/test_plan.py",
    "pallas_kernels/test_gpu_attention.py",
    "engine/test_reference_parity.py",
    "commands/test_compile.py",
    "server/test_server_odd.py",
    "server/routes/test_tokenizers.py",
    "engine/test_tensor_parallel_live.py",
    "engine/test_shared_device.py",
    "pallas_kernels/test_native_attention.py",
    "loading/test_orbax.py",
    "core/test_limits.py",
    "server/test_http_protocol.py",
    "server/routes/test_page.py",
    "engine/test_slow_prefill.py",
    "engine/test_swap.py",
    "server/routes/test_chat.py",
    "engine/test_kv_groups.py",
    "engine/test_beam_search.py",
    "execution/test_gpu_sampler.py",
    "pallas_kernels/test_rotary_kv_write.py",
    "engine/test_llm.py",
    "pallas_kernels/test_native_linear.py",
    "models/test_twins.py",
    "engine/test_stored_blocks.py",
    "pallas_kernels/test_native_packed.py",
    "engine/test_chosen_devices.py",
    "engine/test_new_weights.py",
    "engine/test_in_memory.py",
)
# Files that run in the process of another one, after it, because they share a server.
SAME_WORKER = {
    "server/routes/test_parameters.py": "server/test_server.py",
    "docs/test_examples.py": "docs/test_commands.py",
}


def file_of(node_id: str) -> str:
    """The file of a test, from tests/ on."""
    return node_id.split("::", 1)[0].removeprefix("tests/")


def room_of(node_id: str) -> str:
    """The folder of a test; "." for tests of the whole tree."""
    return str(PurePosixPath(file_of(node_id)).parent)


class LongestFirst(LoadFileScheduling):
    """A unit of work is a file, with those that must run in the same process."""

    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        return SAME_WORKER.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongestFirst | None:
    """For `--dist loadfile`."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by number of tests
    return LongestFirst(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    ranks = {file: rank for rank, file in enumerate(LONGEST)}

    def rank_of(item: pytest.Item) -> int:
        file = file_of(item.nodeid)
        return ranks.get(SAME_WORKER.get(file, file), len(ranks))

    items.sort(key=rank_of)


def seconds_by_room(reports: Iterable[Any]) -> dict[str, tuple[int, float]]:
    """Tests and seconds of each room, fixtures included, the longest first."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for report in reports:
        if isinstance(report, pytest.TestReport):
            room = room_of(report.nodeid)
            seconds[room] += report.duration
            tests[room].add(report.nodeid)
    return {room: (len(tests[room]), seconds[room]) for room in sorted(seconds, key=lambda room: -seconds[room])}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table, where more than one room was tested."""
    rooms = seconds_by_room(report for reports in terminalreporter.stats.values() for report in reports)
    if len(rooms) < 2:
        return
    total = sum(spent for _, spent in rooms.values())
    terminalreporter.section("seconds per room")
    for room, (count, spent) in rooms.items():
        terminalreporter.write_line(f"{room:16} {count:5} tests {spent:8.1f} s {spent / total:6.1%}")
    terminalreporter.write_line(f"{'all':16} {sum(count for count, _ in rooms.values()):5} tests {total:8.1f} s")
