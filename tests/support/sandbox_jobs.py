"""Jobs for `BoundedProcesses`, most of which fare badly: each is the name of what happens, and a path."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

Job = tuple[str, Path | None]


def begin(broken: Path) -> Callable[[Job], str]:
    """The function that runs the jobs; ends its process instead if the file `broken` exists."""
    if broken.exists():
        os._exit(3)
    return run


def run(job: Job) -> str:
    """Run one job and return its name, or the process's id where that is the job."""
    name, path = job
    if name == "kill" or (name == "kill once" and path is not None and not path.exists()):
        if path is not None:
            path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "allocate":
        bytearray(2**31)
    if name == "recurse":
        run_for_ever(0)
    if name == "sleep":
        time.sleep(60)
    if name == "pid":
        time.sleep(0.1)  # so that two at once need two processes
        return str(os.getpid())
    return name


def run_for_ever(depth: int) -> int:
    """Raise RecursionError."""
    return run_for_ever(depth + 1) + 1
