"""Chat templates in small processes of their own: one that runs too long or takes too much memory is cut off.

A template is code out of model files, and clients choose what it loops over. A thread cannot be stopped; a process can.
"""

import logging
import pickle
import queue
import resource
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

from jaxpaged.chat_template import ChatTemplate, TemplateJob
from jaxpaged.errors import RequestError

logger = logging.getLogger(__name__)

MEMORY_BYTES = 2**30
_CHILD = """\
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from jaxpaged.server.template_process import run_child
run_child(pipe)
"""


class TemplateProcesses:
    """Renders conversations, as many at once as there are processes. May be called from several threads.

    Args:
        template: of the model.
        timeout: seconds that one conversation may take.
        count: of processes.
    """

    def __init__(self, template: ChatTemplate, *, timeout: float, count: int) -> None:
        self._template, self._timeout = template, timeout
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(_Child(template))
        self._count = count

    def render(self, job: TemplateJob) -> str:
        """The text of the prompt.

        Raises:
            RequestError: the template refuses the messages, or its time or memory is up.
        """
        child = self._idle.get()
        try:
            answer = child.ask(job, self._timeout)
        except TimeoutError:
            logger.warning("a chat template was cut off after %g s", self._timeout)
            answer = RequestError(f"the chat template did not end within {self._timeout:g} s on these messages",
                                  param="messages")
        except (EOFError, OSError):
            logger.warning("a chat template ended its process")
            answer = RequestError("the chat template failed on these messages", param="messages")
        except RecursionError:
            answer = RequestError("the messages are nested too deeply", param="messages")
        finally:
            if not child.good:
                child.kill()
                child = _Child(self._template)
            self._idle.put(child)
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def close(self) -> None:
        """End the processes."""
        for _ in range(self._count):
            try:
                self._idle.get(timeout=0.1).kill()
            except queue.Empty:
                return  # one is busy: it ends with this process, when its pipe closes


class _Child:
    """One process; `good` until it has missed an answer."""

    def __init__(self, template: ChatTemplate) -> None:
        self.good = True
        self._pipe, child = Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(child.fileno()), "jaxpaged-templates"],
                stdin=subprocess.DEVNULL, pass_fds=[child.fileno()])
        finally:
            child.close()
        try:
            self._pipe.send(sys.path)
            self._pipe.send(template.parts)
        except OSError:
            self.good = False

    def ask(self, job: TemplateJob, timeout: float) -> str | RequestError:
        """What the child says, within `timeout` seconds once it is ready."""
        message = pickle.dumps(job)  # apart: where that fails, nothing was sent
        self.good = False
        self._pipe.send_bytes(message)
        if not self._pipe.poll(timeout):
            raise TimeoutError
        answer = self._pipe.recv()
        assert isinstance(answer, (str, RequestError)), type(answer)
        self.good = True
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def run_child(pipe: Connection) -> None:
    """Render what comes, until the parent's end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        template = ChatTemplate(*pipe.recv())
        while True:
            job = pipe.recv()
            try:
                answer: str | RequestError = template.render(job)
            except RequestError as error:
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        return
