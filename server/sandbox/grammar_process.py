"""Structured outputs compiled in processes of their own.

Some schemas of a few bytes take the compiler hours and all memory: two `multipleOf` are a state for each pair of
remainders. None of the compiler's own limits counts that.
"""

from collections.abc import Callable
from functools import partial

from jaxpaged.core.errors import RequestError
from jaxpaged.core.limits import LIMITS, Limits
from jaxpaged.core.messages import Grammar
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.server.sandbox.bounded_process import BoundedProcesses, CutOffError
from jaxpaged.text.structured_outputs import GrammarCompiler

PROCESSES = 2


class GrammarProcesses:
    """Compiles grammars. May be called from several threads.

    Args:
        timeout: seconds that one grammar may take.
        limits: of what clients send, and of the memory that one grammar may take, which the engine also allocates.
    """

    def __init__(self, *, timeout: float, limits: Limits = LIMITS) -> None:
        self._processes = BoundedProcesses(partial(_begin, limits), name="grammars", timeout=timeout,
                                           timeout_flag="--structured-outputs-timeout",
                                           memory=limits.max_grammar_bytes, count=PROCESSES)

    def grammar(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar of structured outputs, known to compile.

        Raises:
            RequestError: it does not compile, or not within the limits of time and memory.
            UnavailableError: no process can be started, or two have ended.
        """
        try:
            grammar: Grammar = self._processes.run_job(wanted)
        except CutOffError as error:
            raise RequestError(f"compiling the schema, regular expression or grammar {error}; make it simpler",
                               param="structured_outputs") from None
        except RecursionError:
            raise RequestError("the JSON schema is nested too deeply", param="structured_outputs") from None
        return grammar

    def fault(self) -> str | None:
        """Why no grammar can be compiled at the moment."""
        return self._processes.fault()

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def _begin(limits: Limits) -> Callable[[StructuredOutputsParams], Grammar]:
    GrammarCompiler().grammar(StructuredOutputsParams(json_object=True))  # no job pays for the imports
    return GrammarCompiler(limits).grammar
