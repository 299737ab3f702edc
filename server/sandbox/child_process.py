"""Starting processes that do one thing and speak through a pipe."""

import contextlib
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

# Not multiprocessing.Process: that would run the user's main module again and start a helper process of its own.
_CODE = """\
import sys
from importlib import import_module
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
sys.exit(import_module(sys.argv[2]).run_child(pipe))
"""


def start_child(module: str, name: str, first: object) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run `run_child(pipe)` of a module in a process of its own.

    Args:
        name: told in its command line.
        first: what the child finds in its pipe.

    Returns:
        The process, and this end of the pipe. If the child is gone already, whoever reads the pipe learns of it.
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
