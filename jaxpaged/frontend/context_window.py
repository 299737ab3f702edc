"""The only place that checks lengths: of prompts, and of the output after them."""

from dataclasses import dataclass

from jaxpaged.core.errors import ContextLengthError, RequestError


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """What one sequence may hold. The KV pool always has room for it: the engine lowers `max_model_len` to that.

    Attributes:
        max_model_len: maximum number of tokens, of prompt and output together.
        max_token_chars: maximum characters of text that one token decodes to; None where there is no bound.
    """

    max_model_len: int
    max_token_chars: int | None = None

    def check_text(self, num_chars: int, param: str) -> None:
        """Refuse, before any work is done on it, a text that cannot fit whatever its tokens are.

        Raises:
            ContextLengthError: names `param`.
        """
        if self.max_token_chars is not None and num_chars > self.max_model_len * self.max_token_chars:
            raise self._too_long(f"the prompt is too long: it has {num_chars} characters",
                                 "which cannot hold them; shorten it", param)

    def check_prompt(self, num_tokens: int, param: str, min_output: int = 1) -> None:
        """Refuse a prompt that leaves fewer than `min_output` tokens for the output.

        Raises:
            ContextLengthError: names `param`.
        """
        if num_tokens + min_output > self.max_model_len:
            raise self._too_long(f"the prompt is too long: it has {num_tokens} tokens",
                                 "and at least one of them is for the answer; shorten the prompt", param)

    def resolve_max_tokens(self, num_tokens: int, asked: int | None, *, lower: bool = False) -> int:
        """The limit of the output after a prompt of `num_tokens`.

        Args:
            asked: None for as much as fits.
            lower: take what fits where more is asked for.

        Raises:
            ContextLengthError: prompt and output together do not fit.
        """
        room = self.max_model_len - num_tokens
        if asked is None or (lower and asked > room):
            return room
        if asked > room:
            raise self._too_long(
                f"the prompt is too long for max_tokens={asked}: it has {num_tokens} tokens",
                f"and {num_tokens + asked} were asked for; shorten the prompt or lower max_tokens", "max_tokens")
        return asked

    def resolve_truncation(self, asked: object, min_output: int) -> int | None:
        """Number of tokens to truncate a prompt to; None to leave it as it is.

        Args:
            asked: None, a number of tokens, or -1 for as many as fit.

        Raises:
            RequestError: anything else.
        """
        if asked is None:
            return None
        room = self.max_model_len - min_output
        if type(asked) is not int or not (asked == -1 or 1 <= asked <= room):
            raise RequestError(f"truncate_prompt_tokens must be from 1 to {room}, or -1 for that",
                               param="truncate_prompt_tokens")
        return room if asked == -1 else asked

    def _too_long(self, found: str, why: str, param: str) -> ContextLengthError:
        # Clients that do not read the code look for "prompt is too long" or "maximum context length is".
        return ContextLengthError(f"{found}; this model's maximum context length is {self.max_model_len} tokens, {why}",
                                  param=param, code="context_length_exceeded")
