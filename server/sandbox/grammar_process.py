"""What clients want their text to look like, compiled in a process of its own.

Some schemas of a few bytes take the compiler hours and all memory (two `multipleOf` are a state for each pair of
remainders), and none of its limits counts that.
"""

import hashlib
from collections.abc import Callable
from functools import partial

from jaxpaged.core.errors import RequestError
from jaxpaged.core.limits import LIMITS, Limits
from jaxpaged.core.messages import Grammar
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.server.sandbox.bounded_process import BoundedProcesses, CutOffError
from jaxpaged.text.bounded_cache import BoundedCache
from jaxpaged.text.structured_outputs import GrammarCompiler

MAX_KEPT = 256
MAX_KEPT_BYTES = 2**24  # of their texts
PROCESSES = 2


class GrammarProcesses:
    """Makes grammars and remembers them. May be called from several threads.

    Args:
        timeout: seconds that one may take.
        limits: of what clients send, and of the memory that one may take: the engine will spend it, too.
    """

    def __init__(self, *, timeout: float, limits: Limits = LIMITS) -> None:
        self._processes = BoundedProcesses(partial(_begin, limits), name="grammars", timeout=timeout,
                                           memory=limits.max_grammar_bytes, count=PROCESSES)
        self._kept: BoundedCache[bytes, Grammar] = BoundedCache(MAX_KEPT, MAX_KEPT_BYTES)

    def grammar(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar of a constraint, known to compile.

        Raises:
            RequestError: it does not, or not within the limits of time and memory.
        """
        try:
            key = hashlib.sha256(repr(wanted).encode(errors="surrogatepass")).digest()
            kept = self._kept.get(key)
            if kept is not None:
                return kept
            grammar: Grammar = self._processes.run_job(wanted)
        except CutOffError as error:
            raise RequestError(f"compiling the schema, regular expression or grammar {error}; make it simpler "
                               "(--structured-outputs-timeout)",
                               param="structured_outputs") from None
        except RecursionError:
            raise RequestError("the JSON schema is nested too deeply", param="structured_outputs") from None
        self._kept.put(key, grammar, len(grammar.text))
        return grammar

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def _begin(limits: Limits) -> Callable[[StructuredOutputsParams], Grammar]:
    GrammarCompiler().grammar(StructuredOutputsParams(json_object=True))  # imports belong to no job
    return GrammarCompiler(limits).grammar
