"""Processes that are killed, cannot be started, or are not needed any more: no job waits for one that never comes."""

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxpaged.core.errors import UnavailableError
from jaxpaged.server.sandbox import bounded_process
from jaxpaged.server.sandbox.bounded_process import BoundedProcesses, CutOffError
from jaxpaged.server.sandbox.child_process import exit_text
from tests.support.sandbox_jobs import begin


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., BoundedProcesses]]:
    monkeypatch.setattr(bounded_process, "RETRY_SECONDS", 0.05)
    made: list[BoundedProcesses] = []

    def make_one(**arguments: Any) -> BoundedProcesses:
        arguments = {"timeout": 20, "count": 2, "eager": True, **arguments}
        made.append(BoundedProcesses(partial(begin, tmp_path / "broken"), name="tests", memory=2**28,
                                     timeout_flag="--timeout", **arguments))
        return made[-1]

    yield make_one
    for pool in made:
        pool.close()
    wait_for(lambda: not children())  # one that was being started ends a moment later


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children()
            if child.status() != psutil.STATUS_ZOMBIE and "jaxpaged-tests" in child.cmdline()]


def wait_for(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_job_whose_process_is_killed_is_tried_once_more(make: Any, tmp_path: Path,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    pool = make()
    assert pool.run_job(("kill once", tmp_path / "killed")) == "kill once"
    assert "SIGKILL" in caplog.text
    with pytest.raises(UnavailableError, match="tests have ended"):
        pool.run_job(("kill", None))
    assert pool.run_job(("fine", None)) == "fine" and pool.fault() is None


def test_processes_killed_while_idle_cost_no_job_its_try(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    pool = make()
    with ThreadPoolExecutor(2) as threads:  # until both can take jobs: one that is starting is not idle
        while len({*threads.map(pool.run_job, [("pid", None)] * 2)}) < 2:
            pass
    for child in children():
        child.kill()
        child.wait()
    assert pool.run_job(("fine", None)) == "fine"
    wait_for(lambda: len(children()) == 2)
    assert not caplog.records


def test_a_process_killed_while_it_starts_costs_no_job_its_try(make: Any, tmp_path: Path) -> None:
    pool = make(count=1)
    wait_for(children)
    for child in children():  # before it can take jobs
        child.kill()
    assert pool.run_job(("fine", None)) == "fine" and pool.fault() is None


def test_the_jobs_own_faults(make: Any) -> None:
    pool = make(timeout=0.3, count=1, eager=False)
    for _ in range(2):
        with pytest.raises(CutOffError, match="memory"):
            pool.run_job(("allocate", None))
        with pytest.raises(CutOffError, match=r"within 0.3 s"):
            pool.run_job(("sleep", None))
        with pytest.raises(RecursionError):
            pool.run_job(("recurse", None))
    assert pool.run_job(("fine", None)) == "fine"


def test_no_descriptors_for_a_while(make: Any) -> None:
    """Whatever is lost meanwhile comes back by itself, and nobody waits for it."""
    pool = make()
    assert pool.run_job(("fine", None)) == "fine"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        for _ in range(4):  # more often than there are processes
            with pytest.raises(UnavailableError):
                pool.run_job(("kill", None))
        assert "tests" in pool.fault()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_for(lambda: pool.fault() is None)
    assert pool.run_job(("fine", None)) == "fine"
    wait_for(lambda: len(children()) == 2)


def test_processes_that_end_at_their_start(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "broken").touch()
    pool = make(eager=False)
    assert pool.fault() is None  # none has been needed
    with pytest.raises(UnavailableError, match="can be started"):
        pool.run_job(("fine", None))
    assert pool.fault() and "exit code 3" in caplog.text
    wait_for(lambda: caplog.text.count("cannot be started") > 2)
    (tmp_path / "broken").unlink()
    wait_for(lambda: pool.fault() is None)
    assert pool.run_job(("fine", None)) == "fine"


def test_too_little_memory_to_start_is_a_sentence() -> None:
    """The dynamic linker ends with code 127 where it gets too little memory for a library."""
    bounded = f"ulimit -v 5000; exec '{sys.executable}' -c ''"
    done = subprocess.run(["sh", "-c", bounded], capture_output=True, check=False)
    assert done.returncode == 127 and "too little memory" in exit_text(done.returncode)
    assert exit_text(-9) == "was ended by SIGKILL, by the system for lack of memory or by hand"
    assert (exit_text(-11), exit_text(-63), exit_text(3)) == (
        "was ended by SIGSEGV", "was ended by signal 63", "ended with exit code 3")


def test_closing_ends_jobs_that_run_and_jobs_that_wait(make: Any) -> None:
    pool = make(count=1)
    with ThreadPoolExecutor(3) as threads:
        jobs: list[Future[Any]] = [threads.submit(pool.run_job, ("sleep", None)) for _ in range(3)]
        time.sleep(1)
        pool.close()
        for job in jobs:
            assert isinstance(job.exception(timeout=5), UnavailableError)
    with pytest.raises(UnavailableError, match="shutting down"):
        pool.run_job(("fine", None))
