"""Log probabilities as the endpoints write them; OpenAI's client library reads them."""

import json
from typing import Any

import pytest
from openai.types import CompletionChoice
from openai.types.chat.chat_completion import ChoiceLogprobs

from jaxpaged.core.errors import RequestError
from jaxpaged.core.outputs import CompletionOutput, Logprob
from jaxpaged.server.protocol.body import BodyReader
from jaxpaged.server.protocol.logprob_shapes import MIN_LOGPROB, LogprobShape
from jaxpaged.server.protocol.requests import ChatCompletionRequest, CompletionRequest
from tests.support.tiny_tokenizers import byte_level_metadata, wrap

TOKENIZER = wrap(byte_level_metadata("gpt-2"))
END = next(iter(TOKENIZER.eos_token_ids))
TEXT = "hé 你"  # two and three bytes, one token each
IDS = TOKENIZER.encode(TEXT)


def output(ids: list[int], tops: list[dict[int, float]] | None = None, **more: Any) -> CompletionOutput:
    entries = []
    for index, token in enumerate(ids):
        values = {token: -0.5, **(tops[index] if tops else {})}
        ranks = sorted(values, key=lambda key: -values[key])
        entries.append({key: Logprob(value, ranks.index(key) + 1) for key, value in values.items()})
    return CompletionOutput(0, TOKENIZER.decode(ids), tuple(ids), logprobs=tuple(entries),
                            text_offsets=tuple(range(len(ids))), **more)


def test_joined_bytes_are_the_text() -> None:
    assert len(IDS) > len(TEXT), "no character is made of several tokens"
    found = LogprobShape(TOKENIZER, chat=True, count=0, eos_token_ids=frozenset([END])).choice_logprobs(
        output([*IDS, END], finish_reason="stop"))
    content = ChoiceLogprobs.model_validate(found, strict=True).content
    assert content is not None and len(content) == len(IDS) + 1
    assert bytes(byte for item in content for byte in item.bytes or []).decode() == TEXT
    assert content[0].token == "h" and content[1].token.startswith("bytes:\\x")
    assert all(item.top_logprobs == [] for item in content)


def test_a_stop_token_has_bytes_only_where_the_text_shows_it() -> None:
    for keep, wanted in ((False, []), (True, [ord("h")])):
        found = LogprobShape(TOKENIZER, chat=True, count=0, keep_stop=keep).choice_logprobs(
            output([IDS[1], IDS[0]], finish_reason="stop", stop_reason=IDS[0]))
        assert found is not None and found["content"][-1]["bytes"] == wanted
    found = LogprobShape(TOKENIZER, chat=True, count=0).choice_logprobs(output(IDS[:1], finish_reason="length"))
    assert found is not None and found["content"][-1]["bytes"] == [ord("h")]


def test_minus_infinity_becomes_a_number() -> None:
    for chat in (True, False):
        found = LogprobShape(TOKENIZER, chat=chat, count=2).choice_logprobs(
            output(IDS[:1], [{3: float("-inf"), 4: -1e30}]))
        text = json.dumps(found, allow_nan=False)
        assert text.count(str(MIN_LOGPROB)) == (1 if chat else 2)


def test_alternatives_of_the_same_text_are_all_there() -> None:
    """Tokens that the tokenizer does not know have no text at all."""
    unknown = [TOKENIZER.vocab_size + 5, TOKENIZER.vocab_size + 6]
    shape = LogprobShape(TOKENIZER, chat=False, count=3)
    found = shape.choice_logprobs(output(IDS[:1], [{unknown[0]: -1.0, unknown[1]: -2.0, 7: -3.0}]))
    assert found is not None
    [top] = found["top_logprobs"]
    assert sorted(top.values()) == [-3.0, -2.0, -1.0, -0.5]
    choice = CompletionChoice.model_validate(
        {"index": 0, "text": "h", "finish_reason": "length", "logprobs": found}, strict=True)
    assert choice.logprobs is not None and choice.logprobs.token_logprobs == [-0.5]
    chat = LogprobShape(TOKENIZER, chat=True, count=3).choice_logprobs(
        output(IDS[:1], [{unknown[0]: -1.0, unknown[1]: -2.0}]))
    assert chat is not None
    assert [item["logprob"] for item in chat["content"][0]["top_logprobs"]] == [-0.5, -1.0, -2.0]


@pytest.mark.parametrize(("kind", "fields", "param"), [
    (CompletionRequest, {"logprobs": -1}, "logprobs"), (CompletionRequest, {"logprobs": True}, "logprobs"),
    (CompletionRequest, {"logprobs": "3"}, "logprobs"), (ChatCompletionRequest, {"logprobs": 3}, "logprobs"),
    (ChatCompletionRequest, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (ChatCompletionRequest, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (ChatCompletionRequest, {"top_logprobs": 3}, "top_logprobs"),
    (ChatCompletionRequest, {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
])
def test_what_cannot_be_asked_for(kind: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        BodyReader().read_body(kind, json.dumps(fields).encode()).sampling_params(None, {})
    assert caught.value.param == param


@pytest.mark.parametrize(("kind", "fields", "count"), [
    (CompletionRequest, {}, None), (CompletionRequest, {"logprobs": 0}, 0), (CompletionRequest, {"logprobs": 5}, 5),
    (ChatCompletionRequest, {"logprobs": False, "top_logprobs": 0}, None),
    (ChatCompletionRequest, {"logprobs": True}, 0), (ChatCompletionRequest, {"logprobs": True, "top_logprobs": 4}, 4),
    (ChatCompletionRequest, {"logprobs": True, "top_logprobs": None}, 0),
])
def test_how_many_alternatives_are_asked_for(kind: Any, fields: dict[str, Any], count: int | None) -> None:
    params = BodyReader().read_body(kind, json.dumps(fields).encode()).sampling_params(None, {})
    assert params.logprobs == count
