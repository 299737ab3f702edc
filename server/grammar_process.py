"""What clients want their text to look like, compiled in a process of its own.

Some schemas of a few bytes take the compiler hours and all memory (`multipleOf` a large number is a state for each
remainder), and none of its limits counts that.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

from jaxpaged.errors import RequestError
from jaxpaged.sampling_params import StructuredOutputsParams
from jaxpaged.server.bounded_process import BoundedProcesses, CutOffError
from jaxpaged.structured_outputs import GrammarChecker, grammar_of

MEMORY_BYTES = 2**26  # what is compiled here is compiled in the engine, too, which keeps it
MAX_KEPT = 256
PROCESSES = 2


class GrammarProcesses:
    """Makes grammars and remembers them. May be called from several threads.

    Args:
        timeout: seconds that one may take.
    """

    def __init__(self, *, timeout: float) -> None:
        self._processes = BoundedProcesses(_begin, name="grammars", timeout=timeout, memory=MEMORY_BYTES,
                                           count=PROCESSES)
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def grammar(self, wanted: StructuredOutputsParams) -> str:
        """The grammar of a constraint, known to compile.

        Raises:
            RequestError: it does not, or not within the limits of time and memory.
        """
        try:
            key = hashlib.sha256(repr(wanted).encode(errors="surrogatepass")).digest()
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
            grammar: str = self._processes.do(wanted)
        except CutOffError as error:
            raise RequestError(f"compiling the schema, regular expression or grammar {error}; make it simpler",
                               param="structured_outputs") from None
        except RecursionError:
            raise RequestError("the JSON schema is nested too deeply", param="structured_outputs") from None
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def _begin() -> Callable[[StructuredOutputsParams], str]:
    checker = GrammarChecker()
    checker.check(grammar_of(StructuredOutputsParams(json_object=True)))  # imports and tables belong to no job
    return checker.grammar
