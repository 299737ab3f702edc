"""The routes of the OpenAI protocol. Every check on a request is made before its answer starts."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response

from jaxpaged import __version__
from jaxpaged.core.errors import EngineDeadError, NotSupportedError, RequestError, UnavailableError
from jaxpaged.core.limits import LIMITS
from jaxpaged.core.messages import EngineInfo
from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputsParams
from jaxpaged.frontend.answer_forms import OwnCalls
from jaxpaged.frontend.embeddings import EMBEDDING_PARAMS, for_embedding
from jaxpaged.frontend.front import Front
from jaxpaged.frontend.input_processor import ProcessedRequest
from jaxpaged.server.args import BODIES, ServerConfig
from jaxpaged.server.engine.client import EngineClient
from jaxpaged.server.engine.output_stream import OutputStream
from jaxpaged.server.parsers.reasoning import split_reasoning
from jaxpaged.server.protocol.answer_shape import AnswerShape
from jaxpaged.server.protocol.body import Body, BodyReader
from jaxpaged.server.protocol.chat_answer import ChoiceParser
from jaxpaged.server.protocol.chat_tools import choose_tools
from jaxpaged.server.protocol.error_answers import BodyTimeoutError, to_json
from jaxpaged.server.protocol.incoming_bodies import IncomingBodies
from jaxpaged.server.protocol.logprob_shapes import LogprobShape
from jaxpaged.server.protocol.reasoning_tokens import ReasoningTokens
from jaxpaged.server.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    split_prompts,
    template_options,
)
from jaxpaged.server.protocol.responses import EventStream, json_response, on_disconnect
from jaxpaged.server.protocol.structure import structured_outputs_field
from jaxpaged.server.routes.answer_size import check_answer_size, max_output_tokens
from jaxpaged.server.routes.echo import Echo
from jaxpaged.server.routes.embedding_route import EmbeddingRequest, embedding_answer
from jaxpaged.server.routes.engine_state import engine_state
from jaxpaged.server.routes.page import page_response
from jaxpaged.server.routes.pending_completion import MakeParser, PendingCompletion
from jaxpaged.server.routes.request_log import params_text
from jaxpaged.server.routes.token_routes import DetokenizeRequest, TokenizeRequest, TokenRoutes

logger = logging.getLogger(__name__)

_Body = TypeVar("_Body", bound=Body)

COMPLETION_MAX_TOKENS = 16
TOKENIZE_THREADS = 2
GRAMMAR_THREADS = 2


class Api:
    """The handlers of the routes.

    Args:
        config: the server's.
        client: of an engine that is ready.
        front: checks and tokenizes prompts; holds the metrics.
        names: the served model's names; the first is the main one.
        info: the engine's.
        embeddings: whether the engine computes them.
        helper_faults: each says what is wrong with the processes for some part of the work, if anything is.
    """

    def __init__(self, config: ServerConfig, client: EngineClient, front: Front, *, names: Sequence[str],
                 info: EngineInfo, embeddings: bool = False,
                 helper_faults: Sequence[Callable[[], str | None]] = ()) -> None:
        self.config, self._helper_faults = config, helper_faults
        self._client, self._inputs, self._metrics = client, front.inputs, front.metrics
        self.names, self._info, self._defaults = tuple(names), info, front.default_params
        self._tokenizer, self._embeddings = front.tokenizer, embeddings
        self._created = int(time.time())
        self.max_n = front.inputs.max_n
        self._bodies = BodyReader()
        self._token_routes = TokenRoutes(front.inputs, front.tokenizer, info.max_model_len)
        self._threads = ThreadPoolExecutor(TOKENIZE_THREADS, thread_name_prefix="tokenize")
        # Separate: compiling a grammar may be slow, and prompts must not wait for it.
        self._grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, thread_name_prefix="grammar")
        self._page = page_response()
        self._refusal: str | None = None
        self._incoming = IncomingBodies(max_bytes=config.max_request_bytes, timeout=config.body_timeout,
                                        max_total_bytes=BODIES * config.max_request_bytes)

    def refuse(self, reason: str) -> None:
        """Answer 503 to all new requests from now on, including those received in part."""
        self._refusal = reason
        self._incoming.end_all()

    def close(self) -> None:
        """End the threads."""
        for threads in (self._threads, self._grammar_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def health(self, request: Request) -> Response:
        """200 while every kind of request can be served; 503 otherwise."""
        self._check_serving()
        for fault in self._helper_faults:
            reason = fault()
            if reason is not None:
                raise UnavailableError(reason)
        return Response(b"")

    async def version(self, request: Request) -> Response:
        """The version of jaxpaged."""
        return json_response(to_json({"version": __version__}))

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        text, content_type = self._metrics.exposition(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def page(self, request: Request) -> Response:
        """The page for chatting with the model and watching the engine."""
        return self._page

    async def engine_state(self, request: Request) -> Response:
        """The state of every KV block, and the activity of the engine."""
        self._check_serving()
        pool = await self._client.pool_state()
        return json_response(to_json(engine_state(self.names[0], self._info, pool, self._metrics)))

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Drop all cached prefixes."""
        self._check_serving()
        if not self.config.enable_reset_prefix_cache:
            raise NotSupportedError("this route needs a server started with --enable-reset-prefix-cache")
        self._client.reset_prefix_cache()
        return Response(b"")

    async def models(self, request: Request) -> Response:
        """The names of the model."""
        self._check_serving()
        return json_response(to_json({"object": "list", "data": [self._model_card(name) for name in self.names]}))

    async def model(self, request: Request) -> Response:
        """One name of the model."""
        self._check_serving()
        name = request.path_params["name"]
        self._check_model(name)
        return json_response(to_json(self._model_card(name)))

    async def completions(self, request: Request) -> Response:
        """Complete one or more prompts."""
        self._check_serving()
        body = self._bodies.read_body(CompletionRequest, await self._read_body(request))
        self._check_model(body.model)
        params = body.sampling_params(COMPLETION_MAX_TOKENS, self._defaults)
        add_special = body.add_special_tokens is not False

        def prepare(request_id: str, prompt: object) -> ProcessedRequest:
            return self._inputs.process(request_id, prompt, params, add_special_tokens=add_special,
                                        lower_max_tokens=body.max_tokens is None, **body.prompt_options)

        return await self._answer(request, body, params, split_prompts(body.prompt), prepare)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        self._check_serving()
        body = self._bodies.read_body(ChatCompletionRequest, await self._read_body(request))
        self._check_model(body.model)
        config = self.config
        use = choose_tools(body.tools, body.tool_choice, body.parallel_tool_calls,
                           config.tool_call_parser if config.enable_auto_tool_choice else None)
        params = body.chat_sampling_params(self._defaults, use, marks_are_special=self._inputs.marks_are_special)

        form, call = params.structured_outputs, None
        if form is not None and use.own_call is not None and structured_outputs_field(body) == "response_format":
            form, call = use.form_or_call(form)
            params = replace(params, structured_outputs=form)
        calls = None if call is None or use.format is None else OwnCalls(call, use.format, use.one_call)

        def prepare(request_id: str, messages: object) -> ProcessedRequest:
            prompt = self._inputs.render_chat(messages, tools=use.tools, **template_options(body),
                                              may_be_long=body.truncate_prompt_tokens is not None)
            with body.naming_fields():
                return self._inputs.process(
                    request_id, prompt, params, **body.prompt_options, calls=calls,
                    max_output=None if body.stream else max_output_tokens(params, 1, LIMITS))

        def make_parser(prepared: ProcessedRequest) -> ChoiceParser:
            start, token_bytes = prepared.reasoning, self._tokenizer.token_bytes
            return ChoiceParser(split_reasoning(start, exact=form is not None and not form.is_json) if start else None,
                                use.parse, reasoning_tokens=ReasoningTokens(start, token_bytes) if start else None,
                                show_reasoning=body.include_reasoning is not False, one_call=use.one_call)

        return await self._answer(request, body, params, [body.messages], prepare, use.finish_reason,
                                  make_parser if self._inputs.reasons or use.parse else None, call)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or a chat."""
        return await self._answer_in_thread(request, TokenizeRequest, self._token_routes.tokenize)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        return await self._answer_in_thread(request, DetokenizeRequest, self._token_routes.detokenize)

    async def embeddings(self, request: Request) -> Response:
        """Embeddings of one or more texts."""
        self._check_serving()
        body = self._bodies.read_body(EmbeddingRequest, await self._read_body(request))
        self._check_model(body.model)
        if not self._embeddings:
            raise NotSupportedError("embeddings need a server started with --enable-embeddings")
        prompts = split_prompts(body.input, "input")

        def prepare(request_id: str, prompt: object) -> ProcessedRequest:
            try:
                prepared = self._inputs.process(request_id, prompt, EMBEDDING_PARAMS,
                                                add_special_tokens=body.add_special_tokens is not False,
                                                truncate_prompt_tokens=body.truncate_prompt_tokens)
            except RequestError as error:
                if error.param == "prompt":
                    raise error.with_param("input") from None
                raise
            return for_embedding(prepared, body.pooling or "last")

        stream = self._client.admit(len(prompts))
        try:
            with on_disconnect(request.receive, lambda: self._client.close(stream)):
                requests = await self._submit(stream, prepare, uuid.uuid4().hex, prompts)
                order = {item.request_id: index for index, item in enumerate(requests)}
                outputs = sorted(await stream.get_all(), key=lambda output: order[output.request_id])
        finally:
            self._client.close(stream)
        answer = partial(embedding_answer, body, body.model or self.names[0], outputs)
        return json_response(await asyncio.get_running_loop().run_in_executor(self._threads, answer))

    async def _answer(self, request: Request, body: CompletionRequest | ChatCompletionRequest, params: SamplingParams,
                      prompts: Sequence[object], prepare: Callable[[str, object], ProcessedRequest],
                      finish_reason: str = "stop", make_parser: MakeParser | None = None,
                      call: StructuredOutputsParams | None = None) -> Response:
        self._check_serving()  # again: reading the body may have taken a while
        ordinal = uuid.uuid4().hex
        stream = self._client.admit(len(prompts) * params.num_sequences,
                                    LIMITS.max_unread_tokens if body.stream else None,
                                    1 + (params.logprobs or 0))
        try:
            with on_disconnect(request.receive, lambda: self._client.close(stream)):
                for wanted in (params.structured_outputs, call):
                    if wanted is None:
                        continue
                    try:
                        await self._run_in_thread(stream, self._grammar_threads, self._inputs.grammar, wanted)
                    except RequestError as error:
                        of_tools = any(part.name.startswith("tools") for part in wanted.schema_parts)
                        raise error.with_param("tools" if of_tools else structured_outputs_field(body)) from None
                echo = Echo(self._tokenizer, logprobs=params.logprobs is not None) if body.echoes else None

                def finish_preparing(requests: Sequence[ProcessedRequest]) -> None:
                    with body.naming_fields():
                        check_answer_size(requests, params, LIMITS, stream=bool(body.stream), echo=echo is not None,
                                          prompt_ids=bool(body.return_token_ids),
                                          prompt_logprobs=body.prompt_logprobs is not None)
                    if echo is not None:
                        echo.read_prompts(requests)

                requests = await self._submit(stream, prepare, ordinal, prompts, finish_preparing)
                if self.config.enable_log_requests:
                    logger.info("request %s: %d prompt tokens, %s", ordinal,
                                sum(len(item.prompt_token_ids) for item in requests), params_text(params))
                chat = isinstance(body, ChatCompletionRequest)
                sent_id = request.headers.get("x-request-id", "")[:LIMITS.max_request_id_chars]
                name = body.request_id or sent_id or ordinal
                shape = AnswerShape(
                    chat=chat, answer_id=f"{'chatcmpl' if chat else 'cmpl'}-{name}", created=int(time.time()),
                    model=body.model or self.names[0], num_choices=len(requests) * params.n,
                    token_ids=bool(body.return_token_ids), logprobs=self._logprob_shape(chat, params),
                    prompt_logprobs=body.prompt_logprobs is not None)
                pending = PendingCompletion(stream, requests, params.n, shape, make_parser=make_parser,
                                            finish_reason=finish_reason, echo=echo)
                if not body.stream:
                    return await pending.whole()
        except BaseException:  # cancellation included: nothing may be left running
            self._client.close(stream)
            raise
        events = pending.events(self.config.stream_keep_alive or None, body.include_usage, body.continuous_usage)
        return EventStream(events, lambda: self._client.close(stream))

    async def _submit(self, stream: OutputStream, prepare: Callable[[str, object], ProcessedRequest], ordinal: str,
                      prompts: Sequence[object],
                      finish_preparing: Callable[[Sequence[ProcessedRequest]], None] = lambda requests: None
                      ) -> list[ProcessedRequest]:
        requests: list[ProcessedRequest] = await self._run_in_thread(
            stream, self._threads, _prepare_all, stream, prepare, ordinal, prompts, finish_preparing)
        self._client.submit(stream, requests)
        return requests

    async def _run_in_thread(self, stream: OutputStream, threads: ThreadPoolExecutor, work: Callable[..., Any],
                             *arguments: object) -> Any:
        """Run `work` beside the event loop; stop waiting as soon as the stream fails."""
        stream.preparing = asyncio.get_running_loop().run_in_executor(threads, work, *arguments)
        try:
            return await stream.preparing
        except asyncio.CancelledError:
            stream.check()  # raises if the stream has failed, which cancels the waiting
            raise

    async def _answer_in_thread(self, request: Request, kind: type[_Body],
                                work: Callable[[_Body], dict[str, Any]]) -> Response:
        """Answer with the result of `work` on the body, run beside the event loop."""
        self._check_serving()
        body = self._bodies.read_body(kind, await self._read_body(request))
        self._check_model(body.model)

        def run() -> bytes:
            return to_json(work(body))

        return json_response(await asyncio.get_running_loop().run_in_executor(self._threads, run))

    async def _read_body(self, request: Request) -> bytes:
        try:
            return await self._incoming.read(request)
        except BodyTimeoutError:
            self._check_serving()  # `refuse` ends the wait, too
            raise

    def _logprob_shape(self, chat: bool, params: SamplingParams) -> LogprobShape | None:
        if params.logprobs is None:
            return None
        return LogprobShape(self._tokenizer, chat=chat, count=params.logprobs,
                            skip_special_tokens=params.skip_special_tokens,
                            keep_stop=params.include_stop_str_in_output,
                            eos_token_ids=self._inputs.eos_token_ids)

    def _check_serving(self) -> None:
        reason = self._refusal or self._client.fault()
        if reason is not None:
            raise EngineDeadError(reason)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise RequestError(f"there is no such model; GET /v1/models lists the names: {', '.join(self.names)}",
                               param="model", code="model_not_found")

    def _model_card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "jaxpaged",
                "root": self.names[0], "parent": None, "max_model_len": self._info.max_model_len}


def _prepare_all(stream: OutputStream, prepare: Callable[[str, object], ProcessedRequest], ordinal: str,
                 prompts: Sequence[object], finish_preparing: Callable[[Sequence[ProcessedRequest]], None]
                 ) -> list[ProcessedRequest]:
    requests = []
    for index, prompt in enumerate(prompts):
        if stream.closed:  # the client has disconnected
            break
        requests.append(prepare(f"{ordinal}-{index}", prompt))
    finish_preparing(requests)
    return requests
