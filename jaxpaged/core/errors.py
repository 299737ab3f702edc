"""Every error that users see; each text says what to change."""

from typing import Any


class JaxpagedError(Exception):
    """Base of all errors that jaxpaged raises on purpose."""


class ConfigError(JaxpagedError, ValueError):
    """A flag or keyword argument has a value that cannot work."""


class CheckpointError(JaxpagedError):
    """Model files are missing, damaged or do not match the model's definition."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is readable but its architecture or a feature it needs is not supported."""


class RequestError(JaxpagedError, ValueError):
    """A request cannot be served as it is.

    Args:
        message: what is wrong and what to change, without the user's input.
        param: the invalid field, by the name the user knows.
        code: a machine-readable code of the OpenAI API, such as `context_length_exceeded`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def with_param(self, param: str) -> "RequestError":
        """The same error for another field, whose name the user knows."""
        return type(self)(self.message, param=param, code=self.code)

    def with_message(self, message: str) -> "RequestError":
        """The same error in other words."""
        return type(self)(message, param=self.param, code=self.code)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_request_error, (type(self), self.message, self.param, self.code)


def _rebuild_request_error(kind: type[RequestError], message: str, param: str | None, code: str | None) -> RequestError:
    return kind(message, param=param, code=code)


class NotSupportedError(RequestError):
    """The request names a feature that exists in the API but is not implemented."""


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the tokens asked for, exceed the context or the KV pool."""


class OverloadedError(RequestError):
    """The waiting queue is full; the same request may succeed later."""


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a batch.

    Attributes:
        outputs: the RequestOutput of each prompt that was complete, in the order of the prompts; None for the others.
    """

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__(f"{sum(output is not None for output in outputs)} of {len(outputs)} prompts were complete")
        self.outputs = outputs


class UnavailableError(JaxpagedError, RuntimeError):
    """A part of the server cannot do its work at the moment; the same request may succeed later."""


class EngineDeadError(JaxpagedError, RuntimeError):
    """The engine has stopped and serves no more requests."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or its type if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
