"""Bodies of POST /v1/completions and /v1/chat/completions, and their sampling parameters."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from jaxpaged.core.errors import RequestError
from jaxpaged.core.limits import Limits, check_at_most
from jaxpaged.core.sampling_params import (
    MAX_MAX_TOKENS,
    MAX_SEED,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxpaged.server.protocol.body import Body
from jaxpaged.server.protocol.chat_tools import ToolUse
from jaxpaged.server.protocol.structure import structured_outputs, structured_outputs_field

MAX_TOP_LOGPROBS = 20  # of a chat, as in OpenAI's API; --max-logprobs may allow fewer


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = Field(None, description="end the stream with a chunk that reports the usage")
    continuous_usage_stats: bool | None = Field(None, description="every chunk reports the usage so far")


class _RequestBody(Body):
    """Fields that completions and chats share."""

    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, WithJsonSchema(
        {"type": "object", "properties": {"include_usage": {"type": "boolean"},
                                          "continuous_usage_stats": {"type": "boolean"}}})] = None
    n: int | None = Field(None, json_schema_extra={"minimum": 1})
    best_of: int | None = Field(None, json_schema_extra={"minimum": 1})
    max_tokens: int | None = Field(None, json_schema_extra={"minimum": 0})
    min_tokens: int | None = Field(None, json_schema_extra={"minimum": 0})
    temperature: float | None = Field(None, json_schema_extra={"minimum": 0})
    top_p: float | None = Field(None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    top_k: int | None = Field(None, json_schema_extra={"minimum": -1})
    min_p: float | None = Field(None, json_schema_extra={"minimum": 0, "maximum": 1})
    seed: int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_SEED})
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(None, json_schema_extra={"minimum": -2, "maximum": 2})
    frequency_penalty: float | None = Field(None, json_schema_extra={"minimum": -2, "maximum": 2})
    repetition_penalty: float | None = Field(None, json_schema_extra={"exclusiveMinimum": 0})
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id to a number from -100 to 100")
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    expected_output_tokens: int | None = Field(None, json_schema_extra={"minimum": 1})
    add_special_tokens: bool | None = Field(
        None, description="let the tokenizer add special tokens; default: true for completions, false for chats")
    use_beam_search: bool | None = Field(None, description="the n best of best_of beams instead of samples")
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    truncate_prompt_tokens: int | None = Field(None, description="use only the last N tokens of the prompt")
    cache_salt: str | None = Field(None, description="share cached prefixes only with requests of the same salt")
    response_format: dict[str, Any] | None = Field(
        None, description="an object with type text, json_object, or json_schema and a schema")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="an object with one of json, regex, choice, grammar, json_object")
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    prompt_logprobs: int | None = Field(None, description="log probabilities of the prompt's tokens, not streamed")
    return_token_ids: bool | None = Field(None, description="add the token ids of the prompt and of each choice")
    priority: int | None = Field(None, description="lower values are served first, with --scheduling-policy priority")
    request_id: str | None = Field(None, description="becomes part of the answer's id")

    def check(self, limits: Limits) -> None:
        """Refuse unsupported fields and values.

        Raises:
            RequestError: names the field.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs needs stream to be false", param="prompt_logprobs")
        if self.request_id is not None and not (self.request_id and self.request_id.isprintable()):
            raise RequestError("request_id must be a string of printable characters", param="request_id")
        check_at_most("request_id", "characters", len(self.request_id or ""), limits.max_request_id_chars)

    def sampling_params(self, default_max_tokens: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters of this request.

        Args:
            default_max_tokens: used if the request sets none; None for as many as fit.
            defaults: the model's own, used for fields the request leaves out; its max_tokens is ignored.

        Raises:
            RequestError: a value out of range or not supported; names the field.
        """
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if given.get("best_of") == given.get("n", 1):
            given.pop("best_of", None)
        if (logprobs := self.num_logprobs) is not None:
            given["logprobs"] = logprobs
        if (structured := structured_outputs(self)) is not None:
            given["structured_outputs"] = structured
        if self.echoes and (logprobs is not None or self.max_tokens == 0):
            given["prompt_logprobs"] = max(logprobs or 0, self.prompt_logprobs or 0)
        params = SamplingParams(**{**defaults, "max_tokens": default_max_tokens, **given,
                                   "output_kind": RequestOutputKind.DELTA})
        if self.stream and params.num_sequences > params.n:
            raise RequestError("best_of above n needs stream to be false", param="best_of")
        return params

    @contextlib.contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Let the errors of the block name the fields of this body."""
        yield

    @property
    def prompt_options(self) -> dict[str, Any]:
        """What `InputProcessor.process` takes of this request besides the prompt and the sampling parameters."""
        return {"priority": self.priority or 0, "cache_salt": self.cache_salt,
                "truncate_prompt_tokens": self.truncate_prompt_tokens}

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per position; None for no log probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether choices start with the prompt."""
        return False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream reports the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


_SAMPLING_FIELDS = tuple(name for name in _RequestBody.model_fields if name in SamplingParams.__dataclass_fields__)


class CompletionRequest(_RequestBody):
    """Body of POST /v1/completions."""

    prompt: Any = Field(None, description="a string, a list of token ids, or a list of either",
                        json_schema_extra={"anyOf": [
                            {"type": "string"}, {"type": "array", "items": {"type": "string"}},
                            {"type": "array", "items": {"type": "integer"}},
                            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}]})
    logprobs: int | None = Field(None, description="log probabilities with this many alternatives per token")
    echo: bool | None = Field(None, description="start each choice with the prompt")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


class ChatCompletionRequest(_RequestBody):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = Field(None, json_schema_extra={"items": {
        "type": "object", "required": ["role", "content"], "properties": {
            "role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}}}})
    logprobs: bool | None = Field(None, description="log probabilities of the answer's tokens")
    top_logprobs: int | None = Field(None, description="alternatives per token; needs logprobs")
    max_completion_tokens: int | None = Field(None, description="the new name of max_tokens; takes precedence")
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [
        {"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]})] = None
    parallel_tool_calls: bool | None = Field(None, description="false: only the first call")
    include_reasoning: bool | None = Field(None, description="false: leave the reasoning out of the answer")
    add_generation_prompt: bool | None = Field(None, description="default: true, unless continue_final_message is set")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self, limits: Limits) -> None:
        """Refuse unsupported fields and values, and resolve max_completion_tokens.

        Raises:
            RequestError: names the field.
        """
        super().check(limits)
        if self.max_completion_tokens is not None:
            if not 1 <= self.max_completion_tokens <= MAX_MAX_TOKENS:
                raise RequestError(f"max_completion_tokens must be an integer from 1 to {MAX_MAX_TOKENS}",
                                   param="max_completion_tokens")
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")

    @contextlib.contextmanager
    def naming_fields(self) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            if error.param == "max_tokens" and self.max_completion_tokens is not None:
                raise error.with_param("max_completion_tokens") from None
            raise

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def chat_sampling_params(self, defaults: Mapping[str, Any], use: ToolUse, *,
                             marks_are_special: bool = False) -> SamplingParams:
        """The sampling parameters of this request, adapted to its use of tools and to the model's reasoning.

        Args:
            marks_are_special: the marks around the reasoning are special tokens, which the parser has to see whatever
                the request says of special tokens.

        Raises:
            RequestError: see `sampling_params`.
        """
        params = self.sampling_params(None, defaults)
        if use.schema is not None:
            # An answer in the form of response_format is another turn's: this one is a call.
            if params.structured_outputs is not None and structured_outputs_field(self) != "response_format":
                raise RequestError("tool_choice cannot be combined with structured outputs; leave one out",
                                   param="tool_choice")
            params = replace(params, structured_outputs=StructuredOutputsParams(
                json=use.schema, schema_parts=use.schema_parts))
        # Some models mark calls with special tokens, too.
        marked_calls = use.parse is not None and use.schema is None and self.skip_special_tokens is None
        if marks_are_special or marked_calls:
            params = replace(params, skip_special_tokens=False)
        return params


def split_prompts(value: object, param: str = "prompt") -> list[object]:
    """The prompts of a request, each a text or a list of token ids.

    Raises:
        RequestError: they are neither.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if isinstance(value[0], int):
            return [value]
        for kind in (str, list):
            if all(isinstance(item, kind) for item in value):
                return value
    raise RequestError(f"{param} must be a string, a list of token ids, a list of strings or a list of such lists, and "
                       "not empty", param=param)


def template_options(body: Any) -> dict[str, Any]:
    """Options of the chat template, from a body with these fields."""
    continues = bool(body.continue_final_message)
    prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return {"add_generation_prompt": prompt, "continue_final_message": continues,
            "chat_template_kwargs": body.chat_template_kwargs,
            "add_special_tokens": bool(body.add_special_tokens)}
