"""The errors that jaxpaged raises: `except jaxpaged.errors.RequestError`."""

from jaxpaged.core.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    GenerationInterrupted,
    JaxpagedError,
    NotSupportedError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnsupportedModelError,
)

__all__ = ["CheckpointError", "ConfigError", "ContextLengthError", "EngineDeadError", "GenerationInterrupted",
           "JaxpagedError", "NotSupportedError", "OverloadedError", "RequestError", "UnavailableError",
           "UnsupportedModelError"]
