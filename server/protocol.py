"""OpenAI's request bodies, read and checked, and the shapes of the answers."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from jaxpaged.errors import ContextLengthError, NotSupportedError, OverloadedError, RequestError
from jaxpaged.input_processor import check_cache_salt
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import (
    MAX_N,
    MAX_SEED,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxpaged.server.chat_tools import ToolUse
from jaxpaged.server.logprob_shapes import LogprobShape, prompt_entries
from jaxpaged.server.structure import OLD_NAMES, structured_outputs

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128
MAX_UNKNOWN_FIELDS_LOGGED = 100
SMALL_BODY_BYTES = 2**18  # any JSON of this size is read within a moment
MAX_VALUES = 2**20  # in a larger body: as many token ids
MAX_NESTED = 2**16  # keys, objects and lists, which cost many times as much
MAX_QUOTES = 2**18
MAX_TOP_LOGPROBS = 20  # of a chat, as in OpenAI's API; --max-logprobs may allow fewer

# What the API knows and this server cannot do yet, with the values that ask for nothing.
_NOT_SUPPORTED: dict[str, tuple[object, ...]] = {
    "suffix": ("",), "echo": (False,), "top_logprobs": (0,), "max_completion_tokens": (),  # some on one endpoint only
    "continue_final_message": (False,), "chat_template_kwargs": ({},), "parallel_tool_calls": (True, False),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "documents": ([],), "chat_template": (),
    "prompt_embeds": (), "modalities": (["text"],), "audio": (), "prediction": (),
    "web_search_options": (), "logits_processors": (), "kv_transfer_params": (), "adapter": (), "adapter_id": (),
}
# Fields of OpenAI that describe the caller, not the text: nothing is done with them, and no log line is due.
_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
_EXPECTED = {"stop": "must be a string or a list of strings", "stream_options": "must be an object",
             "messages": "must be a list of objects", "tools": "must be a list of objects",
             "stop_token_ids": "must be a list of token ids", "allowed_token_ids": "must be a list of token ids",
             "bad_words": "must be a list of strings", "logit_bias": "must map token ids to numbers",
             "structured_outputs": "must be an object", "response_format": "must be an object",
             "guided_json": "must be a JSON schema", "guided_choice": "must be a list of strings"}


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = Field(None, description="end the stream with a chunk that holds the usage")
    continuous_usage_stats: bool | None = Field(None, description="every chunk holds the usage so far")


class Body(BaseModel):
    """What all request bodies share. A field set to null equals a field left out."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = Field(None, description="a name that GET /v1/models lists")

    def check(self) -> None:
        """Refuse what a single field's type does not tell.

        Raises:
            RequestError: names the field.
        """


class _Request(Body):
    """What both kinds of generation share."""

    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, WithJsonSchema(
        {"type": "object", "properties": {"include_usage": {"type": "boolean"},
                                          "continuous_usage_stats": {"type": "boolean"}}})] = None
    n: int | None = Field(None, json_schema_extra={"minimum": 1, "maximum": MAX_N})
    best_of: int | None = Field(None, json_schema_extra={"minimum": 1, "maximum": MAX_N})
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
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = Field(None, description="the n best of best_of beams instead of samples")
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    truncate_prompt_tokens: int | None = Field(None, description="keep only so many tokens of the prompt, the last")
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
    return_token_ids: bool | None = Field(None, description="add the ids of the prompt and of each choice")
    priority: int | None = Field(None, description="the smaller is served first, with --scheduling-policy priority")
    request_id: str | None = Field(None, description="becomes part of the answer's id")

    def check(self) -> None:
        """Refuse what is known but not supported.

        Raises:
            RequestError: names the field.
        """
        for name, value in (self.model_extra or {}).items():
            neutral = _NOT_SUPPORTED.get(name)
            if neutral is not None and value is not None and not any(
                    type(value) is type(item) and value == item for item in neutral):
                raise NotSupportedError(f"{name} is not supported here; leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs needs stream to be false", param="prompt_logprobs")
        check_cache_salt(self.cache_salt)
        if self.request_id is not None and not (
                0 < len(self.request_id) <= MAX_REQUEST_ID_CHARS and self.request_id.isprintable()):
            raise RequestError(f"request_id must hold 1 to {MAX_REQUEST_ID_CHARS} printable characters",
                               param="request_id")

    def sampling_params(self, default_max_tokens: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling of this request.

        Args:
            default_max_tokens: where the request says nothing; None for as many as fit.
            defaults: the model's own where the request says nothing; its max_tokens does not count.

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

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per position; None for no log probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether choices begin with the prompt."""
        return False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream tells the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


_SAMPLING_FIELDS = tuple(name for name in _Request.model_fields if name in SamplingParams.__dataclass_fields__)


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    prompt: Any = Field(None, description="a string, a list of token ids, or a list of either",
                        json_schema_extra={"anyOf": [
                            {"type": "string"}, {"type": "array", "items": {"type": "string"}},
                            {"type": "array", "items": {"type": "integer"}},
                            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}]})
    logprobs: int | None = Field(None, description="log probabilities with this many alternatives per token")
    echo: bool | None = Field(None, description="begin each choice with the prompt")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


class ChatCompletionRequest(_Request):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = Field(None, json_schema_extra={"items": {
        "type": "object", "required": ["role", "content"], "properties": {
            "role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}}}})
    logprobs: bool | None = Field(None, description="log probabilities of the answer's tokens")
    top_logprobs: int | None = Field(None, description="alternatives per token; needs logprobs")
    max_completion_tokens: int | None = Field(None, description="the newer name of max_tokens; wins over it")
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [
        {"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]})] = None
    parallel_tool_calls: bool | None = Field(None, description="false keeps the first call only")
    include_reasoning: bool | None = Field(None, description="false leaves the reasoning out of the answer")
    add_generation_prompt: bool | None = Field(None, description="default: true, unless continue_final_message is set")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse what is known but not supported, and settle which limit counts.

        Raises:
            RequestError: names the field.
        """
        super().check()
        if self.max_completion_tokens is not None:
            if self.max_completion_tokens < 1:
                raise RequestError("max_completion_tokens must be an integer of at least 1",
                                   param="max_completion_tokens")
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def chat_sampling_params(self, defaults: Mapping[str, Any], use: ToolUse) -> SamplingParams:
        """The sampling of this request, with what its use of tools asks for.

        Raises:
            RequestError: see `sampling_params`.
        """
        params = self.sampling_params(None, defaults)
        if use.schema is not None:
            if params.structured_outputs is not None:
                raise RequestError("tool_choice and a form for the answer exclude each other; leave one out",
                                   param="tool_choice")
            params = replace(params, structured_outputs=StructuredOutputsParams(json=use.schema))
        elif use.grammar is not None and self.skip_special_tokens is None:
            params = replace(params, skip_special_tokens=False)  # some models mark their calls with them
        return params


def template_options(body: Any) -> dict[str, Any]:
    """Options of the chat template, of a body that has these fields."""
    continues = bool(body.continue_final_message)
    prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return {"add_generation_prompt": prompt, "continue_final_message": continues,
            "chat_template_kwargs": body.chat_template_kwargs}


class BodyTooLargeError(RequestError):
    """The request body exceeds the limit."""


class MediaTypeError(RequestError):
    """The request body is not announced as plain JSON."""


_Body = TypeVar("_Body", bound=Body)


class BodyReader:
    """Turns bytes into checked requests, and logs each unknown field name once."""

    def __init__(self) -> None:
        self._unknown: set[str] = set()
        self._warned = False

    def read(self, kind: type[_Body], body: bytes) -> _Body:
        """One request.

        Raises:
            RequestError: the body is not what the API takes; the text names the field, never its value.
        """
        _check_structure(body)
        try:
            request = kind.model_validate_json(body)
        except ValidationError as error:
            raise _explain(error) from None
        for name in request.model_extra or ():
            if name not in _NOT_SUPPORTED and name not in _IGNORED and name not in self._unknown \
                    and len(self._unknown) < MAX_UNKNOWN_FIELDS_LOGGED:
                self._unknown.add(name)
                logger.warning("ignoring the unknown request field %r", name[:64])
        old = [name for name in OLD_NAMES if getattr(request, name, None) is not None]
        if old and not self._warned:
            self._warned = True
            logger.warning("%s is an old name: use structured_outputs", old[0])
        request.check()
        return request


def _check_structure(body: bytes) -> None:
    """Refuse a body that would take seconds to read, in which nothing else in the process runs."""
    if len(body) <= SMALL_BODY_BYTES:
        return
    quotes = body.count(b'"')
    if quotes <= MAX_QUOTES:
        outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])  # of strings
        nested = sum(map(outside.count, (b":", b"{", b"[")))
        if nested <= MAX_NESTED and outside.count(b",") <= MAX_VALUES:
            return
    raise RequestError(f"the request body holds more than {MAX_VALUES} values, {MAX_NESTED} keys, objects and lists or "
                       f"{MAX_QUOTES} quotes")


def _explain(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path, text = first["loc"], first["msg"]
    if first["type"] == "json_invalid":
        return RequestError("the request body is not valid JSON: " + text.removeprefix("Invalid JSON: "))
    if not path:
        return RequestError("the request body must be a JSON object")
    param = str(path[0])
    if param == "stream_options" and len(path) == 2:
        return RequestError(f"stream_options.{path[1]} must be true or false", param=param)
    if param in _EXPECTED:
        return RequestError(f"{param} {_EXPECTED[param]}", param=param)
    return RequestError(f"{param} {text.replace('Input should be', 'must be')}", param=param)


def error_status(error: RequestError) -> int:
    """The HTTP status of a refused request."""
    if isinstance(error, OverloadedError):
        return 503
    if isinstance(error, BodyTooLargeError):
        return 413
    if isinstance(error, MediaTypeError):
        return 415
    return 404 if error.code == "model_not_found" else 400


def error_body(error: RequestError) -> bytes:
    """OpenAI's error object for a refused request."""
    code = error.code
    if code is None and isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    kind = "overloaded_error" if isinstance(error, OverloadedError) else "invalid_request_error"
    return error_json(error.message, kind, error.param, code)


def error_json(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's error object."""
    return to_json({"error": {"message": message, "type": kind, "param": param, "code": code}})


def to_json(value: object) -> bytes:
    """Compact UTF-8; a NaN or infinity, which JSON lacks, is our own mistake and raises ValueError."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens}}


_CHUNK_END = "}]}\n\n"


class AnswerShape:
    """How one request's answer is written: fixed parts are serialised once, so that a chunk costs a few microseconds.

    Args:
        chat: chat completion or text completion.
        answer_id: `id` of the answer and of all its chunks.
        created: seconds since 1970.
        num_choices: over all prompts.
        token_ids: whether choices carry their token ids.
        logprobs: how to write log probabilities, where they were asked for.
        prompt_logprobs: whether whole answers carry those of the prompts.
    """

    def __init__(self, *, chat: bool, answer_id: str, created: int, model: str, num_choices: int,
                 token_ids: bool, logprobs: LogprobShape | None = None, prompt_logprobs: bool = False) -> None:
        self._chat = chat
        self._token_ids = token_ids
        self._logprobs, self._prompt_logprobs = logprobs, prompt_logprobs
        kind = ("chat.completion", "chat.completion.chunk") if chat else ("text_completion", "text_completion")
        self._whole, self._chunk = ({"id": answer_id, "object": name, "created": created, "model": model}
                                    for name in kind)
        head = json.dumps(self._chunk, ensure_ascii=False, separators=(",", ":"))[:-1]
        before = '"delta":{"content":' if chat else '"text":'
        self._before = [f'data: {head},"choices":[{{"index":{index},{before}' for index in range(num_choices)]
        self._after = ("}" if chat else "") + ',"logprobs":null,"finish_reason":null'

    def first_chunk(self, index: int, prompt_token_ids: tuple[int, ...]) -> str:
        """What opens a choice in a stream: the role in chat, nothing in a text completion unless ids are wanted."""
        ids = f',"prompt_token_ids":{json.dumps(prompt_token_ids)}' if self._token_ids else ""
        if self._chat:
            before = self._before[index].removesuffix('"content":') + '"role":"assistant","content":'
        elif ids:
            before = self._before[index]
        else:
            return ""
        return f'{before}""{self._after}{ids}{_CHUNK_END}'

    def text_chunk(self, index: int, choice: CompletionOutput) -> str:
        """New text of one choice; empty where there is nothing to tell."""
        rest = self._rest(choice)
        if not choice.text and rest is None:
            return ""
        return f"{self._before[index]}{_quote(choice.text)}{rest or self._after}{_CHUNK_END}"

    def delta_chunks(self, index: int, deltas: Iterable[dict[str, Any]], choice: CompletionOutput) -> list[str]:
        """What is new in a choice of a chat that is read for tool calls or reasoning.

        Ids and log probabilities of the tokens go with the first chunk, also where it has no words yet.
        """
        before = self._before[index].removesuffix('{"content":')
        rest = self._rest(choice)
        chunks = []
        for delta in [*deltas] or ([{}] if rest else []):
            chunks.append(f"{before}{to_json(delta).decode()}{(rest or self._after)[1:]}{_CHUNK_END}")
            rest = None
        return chunks

    def _rest(self, choice: CompletionOutput) -> str | None:
        """What follows the text: log probabilities and token ids; None where there are none to tell."""
        ids = f',"token_ids":{json.dumps(choice.token_ids)}' if self._token_ids and choice.token_ids else ""
        logprobs = self._logprobs.of(choice) if self._logprobs is not None else None
        if logprobs is None:
            return self._after + ids if ids else None
        return self._after.replace('"logprobs":null', f'"logprobs":{to_json(logprobs).decode()}') + ids

    def last_chunk(self, index: int, finish_reason: str | None, stop_reason: int | str | None) -> str:
        """The end of one choice; all its text has gone before."""
        before = self._before[index].removesuffix('"content":') if self._chat else self._before[index] + '""'
        after = self._after.replace('"finish_reason":null', f'"finish_reason":{json.dumps(finish_reason)}')
        return f'{before}{after},"stop_reason":{json.dumps(stop_reason)}{_CHUNK_END}'

    def with_usage(self, chunk: str, totals: dict[str, Any]) -> str:
        """A chunk that also tells the usage so far."""
        return f'{chunk.removesuffix(_CHUNK_END)}}}],"usage":{to_json(totals).decode()}}}\n\n'

    def usage_chunk(self, totals: dict[str, Any]) -> str:
        """The chunk after all choices."""
        return f"data: {to_json({**self._chunk, 'choices': [], 'usage': totals}).decode()}\n\n"

    def whole(self, outputs: list[RequestOutput], totals: dict[str, Any],
              messages: Sequence[tuple[dict[str, Any], str | None]] = ()) -> bytes:
        """The answer in one piece; choices in prompt-major order.

        Args:
            messages: message and finish reason of each choice of a chat, where they differ from the bare text.
        """
        choices: list[dict[str, Any]] = []
        for output in outputs:
            for choice in output.outputs:
                item: dict[str, Any] = {"index": len(choices)}
                reason: str | None = choice.finish_reason
                if messages:
                    item["message"], reason = messages[len(choices)]
                elif self._chat:
                    item["message"] = {"role": "assistant", "content": choice.text}
                else:
                    item["text"] = choice.text
                logprobs = self._logprobs.of(choice) if self._logprobs is not None else None
                item |= {"logprobs": logprobs, "finish_reason": reason, "stop_reason": choice.stop_reason}
                if self._token_ids:
                    item |= {"token_ids": choice.token_ids, "prompt_token_ids": output.prompt_token_ids}
                if self._prompt_logprobs and not self._chat:
                    item["prompt_logprobs"] = prompt_entries(output.prompt_logprobs)
                choices.append(item)
        more = {"prompt_logprobs": prompt_entries(outputs[0].prompt_logprobs)} \
            if self._prompt_logprobs and self._chat else {}
        return to_json({**self._whole, "choices": choices, "usage": totals, **more})


_quote = json.JSONEncoder(ensure_ascii=False).encode
