"""jaxpaged: paged, continuously batched LLM inference on JAX.

Names are imported on first use, so that `import jaxpaged` alone does not load JAX.
"""

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxpaged.core.quiet_start import without_cuda_notices

if TYPE_CHECKING:
    from jaxpaged import errors
    from jaxpaged.core.config import EngineConfig
    from jaxpaged.core.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxpaged.core.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
    from jaxpaged.engine.async_llm import AsyncLLM
    from jaxpaged.engine.llm import LLM, generate

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "EngineConfig", "Logprob", "RequestOutput", "RequestOutputKind",
           "SamplingParams", "StructuredOutputsParams", "__version__", "errors", "generate"]

_HOME = {
    "LLM": "engine.llm", "generate": "engine.llm", "AsyncLLM": "engine.async_llm", "EngineConfig": "core.config",
    "CompletionOutput": "core.outputs", "Logprob": "core.outputs", "RequestOutput": "core.outputs",
    "RequestOutputKind": "core.sampling_params", "SamplingParams": "core.sampling_params",
    "StructuredOutputsParams": "core.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("jaxpaged.errors")
    if name in _HOME:
        loads_jax = _HOME[name].startswith("engine.") and "jax" not in sys.modules
        with without_cuda_notices() if loads_jax else nullcontext():
            return getattr(import_module(f"jaxpaged.{_HOME[name]}"), name)
    raise AttributeError(f"module 'jaxpaged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
