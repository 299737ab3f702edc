"""Chat templates in separate processes: they are code from model files, and clients choose what it loops over."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxpaged.core.errors import RequestError, UnavailableError
from jaxpaged.server.sandbox.bounded_process import BoundedProcesses, CutOffError
from jaxpaged.text.chat_template import ChatTemplate, RenderedChat, TemplateJob
from jaxpaged.text.template_traits import TemplateTraits


class TemplateProcesses:
    """Renders conversations, each in one of several processes. May be called from several threads.

    Args:
        template: the model's.
        timeout: seconds per conversation.
        memory: bytes per conversation.
        count: number of processes.
    """

    def __init__(self, template: ChatTemplate, *, timeout: float, memory: int, count: int) -> None:
        self._processes = BoundedProcesses(partial(_begin, *template.parts), name="templates", timeout=timeout,
                                           timeout_flag="--chat-template-timeout", memory=memory, count=count,
                                           eager=True)

    def render(self, job: TemplateJob) -> RenderedChat:
        """The text of the prompt.

        Raises:
            RequestError: the template refuses the messages, or exceeds its time or memory.
            UnavailableError: no process can be started, or two have ended.
        """
        try:
            rendered: RenderedChat = self._processes.run_job(job)
        except CutOffError as error:
            raise RequestError(f"the chat template {error} on these messages", param="messages") from None
        except RecursionError:
            raise RequestError("the messages are nested too deeply", param="messages") from None
        return rendered

    def fault(self) -> str | None:
        """Why no conversation can be rendered at the moment."""
        return self._processes.fault()

    def find_traits(self) -> Mapping[str, TemplateTraits] | None:
        """What the templates read and show; None where they exceed their time or memory, or no process starts."""
        try:
            found: Mapping[str, TemplateTraits] = self._processes.run_job(None)
        except (CutOffError, UnavailableError):
            return None
        return found

    def close(self) -> None:
        """Kill the processes."""
        self._processes.close()


def _begin(*parts: Any) -> Callable[[TemplateJob | None], Any]:
    template = ChatTemplate(*parts)

    def run_job(job: TemplateJob | None) -> Any:
        return template.traits if job is None else template.render(job)

    return run_job
