"""Turns the outputs of one completion or chat into its answer, whole or streamed."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from jaxpaged.core.errors import EngineDeadError
from jaxpaged.core.outputs import CompletionOutput, RequestOutput
from jaxpaged.frontend.input_processor import ProcessedRequest
from jaxpaged.server.engine.output_stream import OutputStream, RequestFailedError, StreamClosedError
from jaxpaged.server.protocol.answer_shape import AnswerShape, usage
from jaxpaged.server.protocol.chat_answer import ChoiceParser, join_deltas
from jaxpaged.server.protocol.responses import JsonParts, server_error
from jaxpaged.server.routes.echo import Echo
from jaxpaged.server.routes.turns import Turn

_DONE = "data: [DONE]\n\n"
SLICE_TOKENS = 64
SLICE_CHARS = 1024
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
        turn = Turn()
        for output in outputs:
            for choice in output.outputs:
                self._count_tokens(output, choice)
                await self._take_turns(turn)
        if self._echo is not None:
            outputs = [self._echo.prepend_prompt(output) for output in outputs]
        messages: list[tuple[dict[str, Any], str | None]] = []
        if self._parsers:
            for choice in (choice for output in outputs for choice in output.outputs):
                parser = self._parsers[len(messages)]
                deltas: list[dict[str, Any]] = []
                for text, last in _slices_of_text(choice):
                    deltas += parser.add_text(text, last)
                    await self._take_turns(turn)
                messages.append((join_deltas(deltas), self._finish_reason_of(parser, choice)))
        parts: list[bytes] = []
        for part in self._shape.whole(outputs, self._usage(), messages):
            parts.append(part)
            await self._take_turns(turn)
        return JsonParts(parts)

    async def _take_turns(self, turn: Turn) -> None:
        if turn.is_over:
            await turn.start_next()
            self._stream.check()  # the client may have left

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
                turn = Turn()
                for output in outputs:
                    for choice in output.outputs:
                        self._count_tokens(output, choice)
                    unfinished -= output.finished
                    for event in self._events_of(output, opened):
                        events.append(self._shape.with_usage(event, self._usage()) if continuous_usage else event)
                        if turn.is_over:
                            yield "".join(events)
                            events.clear()
                            await turn.start_next()
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

    def _events_of(self, output: RequestOutput, opened: set[int]) -> Iterator[str]:
        if self._echo is not None:
            output = self._echo.prepend_prompt(output)
        first = self._prompt_index[output.request_id] * self._n
        for whole in output.outputs:
            index = first + whole.index
            if index not in opened:
                opened.add(index)
                yield from filter(None, [self._shape.first_chunk(index, output.prompt_token_ids)])
            for choice in _slices(whole):
                yield from filter(None, self._chunks_of(index, choice))

    def _chunks_of(self, index: int, choice: CompletionOutput) -> Iterator[str]:
        shape, parser = self._shape, self._parsers.get(index)
        reason: str | None = choice.finish_reason
        if parser is None:
            yield shape.text_chunk(index, choice)
        else:
            for text, last in _slices_of_text(choice):
                yield from shape.delta_chunks(index, parser.add_text(text, last), choice)
                choice = replace(choice, token_ids=(), logprobs=None)  # they have been written
            reason = self._finish_reason_of(parser, choice)
        if reason is not None:
            yield shape.last_chunk(index, reason, choice.stop_reason)

    def _finish_reason_of(self, parser: ChoiceParser, choice: CompletionOutput) -> str | None:
        return self._finish_reason if parser.called and choice.finish_reason == "stop" else choice.finish_reason

    def _count_tokens(self, output: RequestOutput, choice: CompletionOutput) -> None:
        index = self._prompt_index[output.request_id]
        self._cached[index] = output.num_cached_tokens
        self._completion_tokens += len(choice.token_ids)
        parser = self._parsers.get(index * self._n + choice.index)
        if parser is not None and parser.reasoning_tokens is not None:
            parser.reasoning_tokens.add_tokens(choice.token_ids, choice.finish_reason is not None)

    def _usage(self) -> dict[str, Any]:
        counts = [parser.reasoning_tokens.count for parser in self._parsers.values() if parser.reasoning_tokens]
        return usage(sum(len(request.prompt_token_ids) for request in self._requests), self._completion_tokens,
                     sum(self._cached), sum(counts) if counts else None)


def _slices(choice: CompletionOutput) -> Iterator[CompletionOutput]:
    """A choice with few log probabilities at a time; all of its text is in the first slice."""
    count = len(choice.token_ids)
    if not choice.logprobs or count <= SLICE_TOKENS:
        yield choice
        return
    for first in range(0, count, SLICE_TOKENS):
        last, part = first + SLICE_TOKENS >= count, slice(first, first + SLICE_TOKENS)
        yield replace(choice, text="" if first else choice.text, token_ids=choice.token_ids[part],
                      logprobs=choice.logprobs[part], text_offsets=choice.text_offsets[part],
                      finish_reason=choice.finish_reason if last else None)


def _slices_of_text(choice: CompletionOutput) -> Iterator[tuple[str, bool]]:
    """A choice's text in slices, with whether it is the last of all."""
    ended, size = choice.finish_reason is not None, len(choice.text)
    for first in range(0, max(size, 1), SLICE_CHARS):
        yield choice.text[first : first + SLICE_CHARS], ended and first + SLICE_CHARS >= size
