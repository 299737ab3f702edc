"""jaxpaged: paged, continuously batched LLM inference on JAX.

Names are imported on first use, so that `import jaxpaged` alone does not load JAX.
"""

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxpaged.quiet_start import without_cuda_notices

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM
    from jaxpaged.config import EngineConfig
    from jaxpaged.llm import LLM, generate
    from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxpaged.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "EngineConfig", "Logprob", "RequestOutput", "RequestOutputKind",
           "SamplingParams", "StructuredOutputsParams", "__version__", "generate"]

_HOME = {
    "LLM": "llm", "generate": "llm", "AsyncLLM": "async_llm", "EngineConfig": "config",
    "CompletionOutput": "outputs", "Logprob": "outputs", "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params", "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        loads_jax = _HOME[name] in ("llm", "async_llm") and "jax" not in sys.modules
        with without_cuda_notices() if loads_jax else nullcontext():
            return getattr(import_module(f"jaxpaged.{_HOME[name]}"), name)
    raise AttributeError(f"module 'jaxpaged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
