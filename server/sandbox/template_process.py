"""Chat templates in processes of their own: they are code out of model files, and clients choose what it loops over."""

from collections.abc import Callable
from functools import partial

from jaxpaged.core.errors import RequestError
from jaxpaged.server.sandbox.bounded_process import BoundedProcesses, CutOffError
from jaxpaged.text.chat_template import ChatTemplate, TemplateJob


class TemplateProcesses:
    """Renders conversations, as many at once as there are processes. May be called from several threads.

    Args:
        template: of the model.
        timeout: seconds that one conversation may take.
        memory: bytes that it may take.
        count: of processes.
    """

    def __init__(self, template: ChatTemplate, *, timeout: float, memory: int, count: int) -> None:
        self._processes = BoundedProcesses(partial(_begin, *template.parts), name="templates", timeout=timeout,
                                           memory=memory, count=count, eager=True)

    def render(self, job: TemplateJob) -> str:
        """The text of the prompt.

        Raises:
            RequestError: the template refuses the messages, or its time or memory is up.
        """
        try:
            text: str = self._processes.do(job)
        except CutOffError as error:
            raise RequestError(f"the chat template {error} on these messages "
                               "(--chat-template-timeout)", param="messages") from None
        except RecursionError:
            raise RequestError("the messages are nested too deeply", param="messages") from None
        return text

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def _begin(sources: dict[str, str], special_tokens: dict[str, str]) -> Callable[[TemplateJob], str]:
    return ChatTemplate(sources, special_tokens).render
