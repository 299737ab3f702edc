"""Starting child processes that communicate through a pipe."""

import contextlib
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

# Not multiprocessing.Process: that runs the user's main module again and starts a helper process.
_CODE = """\
import sys
from importlib import import_module
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
sys.exit(import_module(sys.argv[2]).run_child(pipe))
"""

_NO_LIBRARY = 127  # of the system's dynamic linker


def start_child(module: str, name: str, first: object) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run `run_child(pipe)` of a module in a process of its own.

    Args:
        name: shown in its command line.
        first: the first message in its pipe.

    Returns:
        The process, and this end of the pipe. If the child has ended already, reading the pipe raises EOFError.
    """
    pipe, end = Pipe()
    try:
        process = subprocess.Popen([sys.executable, "-c", _CODE, str(end.fileno()), module, f"jaxpaged-{name}"],
                                   stdin=subprocess.DEVNULL, pass_fds=[end.fileno()])
    finally:
        end.close()
    with contextlib.suppress(OSError):
        pipe.send(sys.path)
        pipe.send(first)
    return process, pipe


def exit_text(code: int) -> str:
    """What an exit code of `subprocess` says, as the predicate of a sentence."""
    if code == -signal.SIGKILL:
        return "was ended by SIGKILL, by the system for lack of memory or by hand"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
    if code == _NO_LIBRARY:
        return "could not load its libraries: there is too little memory, or a limit of it (ulimit -v) is too low"
    return f"ended with exit code {code}"
