"""Grammars checked in a process of their own: cut off where a check takes too long."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxpaged.core.errors import RequestError
from jaxpaged.core.limits import Limits
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.server.sandbox.grammar_process import GrammarProcesses
from jaxpaged.text.structured_outputs import GrammarCompiler


def test_a_slow_compilation_is_cut_off() -> None:
    """A state for each remainder: a schema of a few bytes that the compiler's own limits do not bound."""
    hostile = StructuredOutputsParams(json={"items": {"type": "integer", "multipleOf": 99_999_989}})
    good = StructuredOutputsParams(json={"items": {"type": "integer", "multipleOf": 7}})
    one_letter = StructuredOutputsParams(regex="a")
    here = GrammarCompiler()
    for timeout in (0.05, 60):  # out of time, out of memory
        processes = GrammarProcesses(timeout=timeout, limits=Limits(max_multiple_of=10**9))
        with ThreadPoolExecutor(2) as threads:
            answer = threads.submit(processes.grammar, hostile)
            assert processes.grammar(good).text == here.grammar(good).text
            with pytest.raises(RequestError, match="simpler") as caught:
                answer.result()
        assert caught.value.param == "structured_outputs"
        assert processes.grammar(one_letter).text == here.grammar(one_letter).text
        processes.close()
