"""Large answers are refused before they are computed, or written without holding up others."""

import asyncio
import gc
import json
import pickle
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from jaxpaged.core.errors import RequestError
from jaxpaged.core.limits import Limits
from jaxpaged.core.messages import PackedLogprobs, TokenDelta, TokenLogprobs
from jaxpaged.core.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.frontend.input_processor import InputProcessor
from jaxpaged.frontend.output_processor import OutputProcessor
from jaxpaged.server.engine.output_stream import OutputStream
from jaxpaged.server.parsers.tool_calls import make_tool_parser
from jaxpaged.server.protocol.answer_shape import AnswerShape
from jaxpaged.server.protocol.chat_answer import ChoiceParser
from jaxpaged.server.protocol.logprob_shapes import LogprobShape
from jaxpaged.server.protocol.responses import JsonParts
from jaxpaged.server.routes.answer_size import check_answer_size, max_output_tokens
from jaxpaged.server.routes.echo import Echo
from jaxpaged.server.routes.pending_completion import PendingCompletion
from tests.support.tiny_tokenizers import byte_level_metadata, wrap

TOKENIZER = wrap(byte_level_metadata("gpt-2"))
ALTERNATIVES = 20
MAX_SECONDS = 0.1  # of the processor, between two turns of others; at the time of writing 0.01


def inputs() -> InputProcessor:
    return InputProcessor(TOKENIZER, max_model_len=2**20, vocab_size=TOKENIZER.vocab_size, max_n=2**10)


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5, 1, tuple((number, -float(number)) for number in range(ALTERNATIVES)))


# Sizes


SIZE_LIMITS = Limits(max_answer_tokens=1000, max_answer_logprobs=600)


@pytest.mark.parametrize(("prompts", "given", "flags", "entries"), [
    # prompts of 10 tokens; entries: of the answer, or of its tokens
    (2, {"max_tokens": 20, "n": 3, "logprobs": 4}, {}, 600),
    (2, {"max_tokens": 20, "n": 1, "best_of": 3, "logprobs": 4}, {}, 600),
    (2, {"max_tokens": 500}, {}, 1000),
    (2, {"max_tokens": 480, "n": 1}, {"prompt_ids": True}, 980),
    (5, {"max_tokens": 10**5, "n": 20, "ignore_eos": True}, {"stream": True, "echo": True}, 1000),
    (4, {"max_tokens": 0, "prompt_logprobs": 14}, {"prompt_logprobs": True}, 600),
    (2, {"max_tokens": 5, "n": 2, "prompt_logprobs": 9, "logprobs": 9}, {"echo": True}, 600),
    (2, {"max_tokens": 500, "n": 2, "prompt_logprobs": 9, "logprobs": 9}, {"echo": True, "stream": True}, 400),
])
def test_what_an_answer_may_hold_is_bounded_before_it_is_computed(prompts: int, given: dict[str, Any],
                                                                   flags: dict[str, bool], entries: int) -> None:
    params = SamplingParams(**given)
    requests = [inputs().process(str(number), [1] * 10, params) for number in range(prompts)]
    all_flags = {"stream": False, "echo": False, "prompt_ids": False, "prompt_logprobs": False, **flags}
    scored = params.logprobs is not None or params.prompt_logprobs is not None
    check_answer_size(requests, params, SIZE_LIMITS, **all_flags)
    name = "max_answer_logprobs" if scored else "max_answer_tokens"
    check_answer_size(requests, params, Limits(**{name: entries}), **all_flags)
    with pytest.raises(RequestError, match=f"{entries:,} .*at most {entries - 1:,}.*lower .*max_tokens") as caught:
        check_answer_size(requests, params, Limits(**{name: entries - 1}), **all_flags)
    assert caught.value.param in ("logprobs", "max_tokens", "n")


@pytest.mark.parametrize("given", [{}, {"n": 3}, {"logprobs": 0}, {"logprobs": 4, "n": 2}, {"logprobs": 20, "n": 100}])
def test_a_max_tokens_that_is_not_given_fits(given: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=None, **given)
    most = max_output_tokens(params, 1, SIZE_LIMITS)
    request = inputs().process("a", [1] * 10, params, max_output=most)
    assert request.max_tokens == most == request.sequences[0].max_tokens
    if most > 1:
        check_answer_size([request], params, SIZE_LIMITS, stream=False, echo=False, prompt_ids=False,
                          prompt_logprobs=False)
    assert inputs().process("a", [1] * 10, params).max_tokens == 2**20 - 10


# Turns


def turns_taken(make: Callable[[], PendingCompletion], work: Callable[[PendingCompletion], Awaitable[Any]]
                ) -> tuple[Any, float]:
    """The result of the work on an answer, and the most seconds of the processor that others waited for."""
    async def run() -> tuple[Any, float]:
        answer = make()
        gc.collect()
        gc.freeze()  # as the server does after its start: the objects of other tests take the collector long
        longest, ended, last = 0.0, False, time.thread_time()

        async def other() -> None:
            nonlocal longest, last
            while not ended:
                now = time.thread_time()
                longest, last = max(longest, now - last), now
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        result = await work(answer)
        ended = True
        await task
        return result, longest

    try:
        return asyncio.run(run())
    finally:
        gc.unfreeze()


def pending(text: str, *, params: SamplingParams, num_tokens: int, make_parser: Any = None, chat: bool = False,
            echo: bool = False) -> PendingCompletion:
    """An answer whose outputs have all arrived."""
    params = replace(params, output_kind=RequestOutputKind.DELTA)
    request = inputs().process("a", text, params, lower_max_tokens=True)
    processor = OutputProcessor(TOKENIZER, lazy_logprobs=True)
    processor.add_request("a", request.prompt, request.prompt_token_ids, params, 0.0)
    scores = PackedLogprobs()
    if params.prompt_logprobs is not None:
        scores.extend(map(entry, request.prompt_token_ids[1:]))
    stream = OutputStream(1)
    stream.running["a"] = 1
    ids = [TOKENIZER.encode("x")[0]] * num_tokens
    for first in range(0, num_tokens, 1000):
        part = ids[first : first + 1000]
        last = first + 1000 >= num_tokens
        delta = TokenDelta("a#0", tuple(part), finish_reason="length" if last else None,
                           logprobs=tuple(map(entry, part)) if params.logprobs is not None else (),
                           prompt_logprobs=() if first else scores)
        [output] = processor.process([delta], 1.0).outputs
        stream.put(output)
    stream.end("a")
    echoing = Echo(TOKENIZER, logprobs=params.logprobs is not None) if echo else None
    if echoing is not None:
        echoing.read_prompts([request])
    shape = AnswerShape(chat=chat, answer_id="a", created=1, model="m", num_choices=1, token_ids=True,
                        logprobs=LogprobShape(TOKENIZER, chat=chat, count=ALTERNATIVES) if params.logprobs else None,
                        prompt_logprobs=params.prompt_logprobs is not None and not echo)
    return PendingCompletion(stream, [request], 1, shape, echo=echoing,
                             make_parser=make_parser and (lambda prepared: make_parser()))


def whole(make: Callable[[], PendingCompletion]) -> tuple[dict[str, Any], float]:
    """A whole answer's JSON, and the longest turn."""
    response, longest = turns_taken(make, PendingCompletion.whole)
    assert isinstance(response, JsonParts)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(response({}, None, send))  # type: ignore[arg-type]
    body = b"".join(message["body"] for message in sent[1:])
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()
    assert max(len(message["body"]) for message in sent[1:]) < 2**20
    return json.loads(body)["choices"][0], longest


def streamed(make: Callable[[], PendingCompletion]) -> tuple[list[dict[str, Any]], float]:
    """The choices of a streamed answer's chunks, and the longest turn."""
    async def read(answer: PendingCompletion) -> list[str]:
        return [text async for text in answer.events(None, False)]

    events, longest = turns_taken(make, read)
    lines = [line.removeprefix("data: ") for line in "".join(events).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines], longest


@pytest.mark.parametrize("echo", [False, True])
def test_many_log_probabilities_take_turns_with_others(echo: bool) -> None:
    """The text, the ids and all lists are the same, whole and streamed."""
    prompt, count = "a b" * (4000 if echo else 1), 1000 if echo else 5000
    params = SamplingParams(max_tokens=count, logprobs=ALTERNATIVES, prompt_logprobs=ALTERNATIVES if echo else None)
    found, longest = whole(partial(pending, prompt, params=params, num_tokens=count, echo=echo))
    assert longest < MAX_SECONDS
    assert found["text"] == prompt * echo + "x" * count
    ids = TOKENIZER.encode(prompt) if echo else []
    assert found["logprobs"]["tokens"][len(ids) :] == ["x"] * count
    assert len(found["logprobs"]["top_logprobs"]) == len(ids) + count
    assert len(found["logprobs"]["top_logprobs"][-1]) > ALTERNATIVES - 5
    chunks, longest = streamed(partial(pending, prompt, params=params, num_tokens=count, echo=echo))
    assert longest < MAX_SECONDS
    assert "".join(chunk["text"] for chunk in chunks) == found["text"]
    assert [token for chunk in chunks for token in chunk.get("token_ids", ())] == found["token_ids"]
    for name, values in found["logprobs"].items():
        assert [value for chunk in chunks for value in (chunk["logprobs"] or {}).get(name, ())] == values
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]


def test_prompt_log_probabilities_take_turns_with_others() -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=ALTERNATIVES)
    found, longest = whole(partial(pending, "a b" * 4000, params=params, num_tokens=1))
    entries = found["prompt_logprobs"]
    assert longest < MAX_SECONDS
    assert entries[0] is None and len(entries) == len(found["prompt_token_ids"])
    assert all(item[str(token)]["rank"] == 1 for item, token in zip(
        entries[1:], found["prompt_token_ids"][1:], strict=True))


def test_long_texts_that_are_parsed_take_turns_with_others() -> None:
    def parser() -> ChoiceParser:
        return ChoiceParser(None, make_tool_parser("hermes", ["f"]))

    count = 200_000
    params = SamplingParams(max_tokens=count)
    found, longest = whole(partial(pending, "a", params=params, num_tokens=count, make_parser=parser, chat=True))
    assert found["message"]["content"] == "x" * count and longest < MAX_SECONDS
    chunks, longest = streamed(partial(pending, "a", params=params, num_tokens=count, make_parser=parser, chat=True))
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "x" * count and longest < MAX_SECONDS


def test_packed_log_probabilities_read_like_a_list() -> None:
    values = [TokenLogprobs(-float(number), number, ((number, -1.5), (7, float("-inf")))) for number in range(9)]
    packed = PackedLogprobs()
    packed.extend(values[:6])
    packed.truncate(4)
    packed.extend(values[4:])
    for found in (packed, pickle.loads(pickle.dumps(packed))):
        assert list(found) == values and found[-1] == values[-1] and found[2:5] == tuple(values[2:5])
    with pytest.raises(IndexError):
        packed[9]
    packed.truncate(0)
    assert not packed
