"""Turns the outputs of one completion or chat into its answer, whole or streamed."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import Response

from jaxpaged.core.errors import EngineDeadError
from jaxpaged.core.outputs import CompletionOutput, RequestOutput
from jaxpaged.frontend.input_processor import ProcessedRequest
from jaxpaged.server.engine.output_stream import OutputStream, RequestFailedError, StreamClosedError
from jaxpaged.server.protocol.answer_shape import AnswerShape, usage
from jaxpaged.server.protocol.chat_answer import ChoiceParser, join_deltas
from jaxpaged.server.protocol.responses import json_response, server_error
from jaxpaged.server.routes.echo import Echo

_DONE = "data: [DONE]\n\n"
_KEEP_ALIVE = ": keep-alive\n\n"  # an SSE comment, which clients ignore
MakeParser = Callable[[ProcessedRequest], ChoiceParser]


class PendingCompletion:
    """An answer in the making. Choice `i * n + c` of the answer is choice c of prompt i.

    Args:
        make_parser: for chats with tool calls or reasoning; called once for each choice.
        finish_reason: of a complete choice with tool calls.
        echo: prepends the prompts to the choices.
    """

    def __init__(self, stream: OutputStream, requests: Sequence[ProcessedRequest], n: int, shape: AnswerShape, *,
                 make_parser: MakeParser | None = None, finish_reason: str = "tool_calls",
                 echo: Echo | None = None) -> None:
        self._stream, self._requests, self._n, self._shape = stream, requests, n, shape
        self._finish_reason = finish_reason
        self._echo = echo
        self._parsers = {} if make_parser is None else {
            index * n + choice: make_parser(request)
            for index, request in enumerate(requests) for choice in range(n)}
        self._prompt_index = {request.request_id: index for index, request in enumerate(requests)}
        self._cached = [0] * len(requests)
        self._completion_tokens = 0

    async def whole(self) -> Response:
        """The answer as one JSON object."""
        outputs = sorted(await self._stream.get_all(), key=lambda output: self._prompt_index[output.request_id])
        for output in outputs:
            self._count_tokens(output)
        if self._echo is not None:
            outputs = [self._echo.prepend_prompt(output) for output in outputs]
        if self._parsers:
            messages: list[tuple[dict[str, Any], str | None]] = []
            for choice in (choice for output in outputs for choice in output.outputs):
                parser = self._parsers[len(messages)]
                deltas = parser.add_text(choice.text, True)
                messages.append((join_deltas(deltas), self._finish_reason_of(parser, choice)))
            return json_response(self._shape.whole(outputs, self._usage(), messages))
        return json_response(self._shape.whole(outputs, self._usage()))

    async def events(self, keep_alive: float | None, include_usage: bool,
                     continuous_usage: bool = False) -> AsyncIterator[str]:
        """The answer as server-sent events, several at a time; a late error is an event, too.

        Args:
            keep_alive: seconds without an event after which a keep-alive comment is sent; None for never.
            include_usage: end with a chunk that reports the usage.
            continuous_usage: report the usage so far in every chunk.
        """
        if keep_alive is not None:
            self._stream.wake_every(keep_alive)
        try:
            opened: set[int] = set()
            unfinished = len(self._requests)
            while unfinished:
                events: list[str] = []
                outputs = await self._stream.get()
                if not outputs:
                    yield _KEEP_ALIVE
                    continue
                for output in outputs:
                    self._add_events(events, output, opened)
                    unfinished -= output.finished
                if continuous_usage:
                    totals = self._usage()
                    events = [self._shape.with_usage(event, totals) for event in events if event]
                if not unfinished:
                    if include_usage:
                        events.append(self._shape.usage_chunk(self._usage()))
                    events.append(_DONE)
                if events:
                    yield "".join(events)
        except StreamClosedError:
            return
        except (EngineDeadError, RequestFailedError) as error:
            yield f"data: {server_error(error).decode()}\n\n{_DONE}"

    def _add_events(self, events: list[str], output: RequestOutput, opened: set[int]) -> None:
        self._count_tokens(output)
        if self._echo is not None:
            output = self._echo.prepend_prompt(output)
        shape, first = self._shape, self._prompt_index[output.request_id] * self._n
        for choice in output.outputs:
            index = first + choice.index
            if index not in opened:
                opened.add(index)
                events.append(shape.first_chunk(index, output.prompt_token_ids))
            parser = self._parsers.get(index)
            reason: str | None = choice.finish_reason
            if parser is None:
                events.append(shape.text_chunk(index, choice))
            else:
                deltas = parser.add_text(choice.text, reason is not None)
                events += shape.delta_chunks(index, deltas, choice)
                reason = self._finish_reason_of(parser, choice)
            if reason is not None:
                events.append(shape.last_chunk(index, reason, choice.stop_reason))

    def _finish_reason_of(self, parser: ChoiceParser, choice: CompletionOutput) -> str | None:
        return self._finish_reason if parser.called and choice.finish_reason == "stop" else choice.finish_reason

    def _count_tokens(self, output: RequestOutput) -> None:
        self._cached[self._prompt_index[output.request_id]] = output.num_cached_tokens
        first = self._prompt_index[output.request_id] * self._n
        for choice in output.outputs:
            self._completion_tokens += len(choice.token_ids)
            parser = self._parsers.get(first + choice.index)
            if parser is not None and parser.reasoning_tokens is not None:
                parser.reasoning_tokens.add_tokens(choice.token_ids, choice.finish_reason is not None)

    def _usage(self) -> dict[str, Any]:
        counts = [parser.reasoning_tokens.count for parser in self._parsers.values() if parser.reasoning_tokens]
        return usage(sum(len(request.prompt_token_ids) for request in self._requests), self._completion_tokens,
                     sum(self._cached), sum(counts) if counts else None)
