"""Texts, stop strings, kinds of output, several choices, and errors that stay where they are."""

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.errors import RequestError
from jaxpaged.core.messages import TokenDelta, TokenLogprobs
from jaxpaged.core.outputs import CompletionOutput, RequestOutput
from jaxpaged.core.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.frontend.output_processor import OutputProcessor, ProcessedOutputs
from jaxpaged.text.stop_strings import StopStrings
from jaxpaged.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, wrap

BYTES = wrap(byte_level_metadata("gpt-2"))
LETTER = {BYTES.token_bytes(number): number for number in range(256)}
END = BYTES.vocab_size - 1  # <|end|>
PROMPT = [LETTER[b"p"]]


def char_ids(text: str) -> list[int]:
    """One token per byte."""
    return [LETTER[bytes([byte])] for byte in text.encode()]


class Run:
    """One request of an OutputProcessor, fed token by token."""

    def __init__(self, tokenizer: Tokenizer | None = BYTES, prompt: list[int] | None = None, **params: Any) -> None:
        self.processor = OutputProcessor(tokenizer)
        self.ids = self.processor.add_request("r", "p", prompt or PROMPT, SamplingParams(**params), 10.0)
        self.outputs: list[RequestOutput] = []
        self.aborted: list[str] = []

    def feed(self, token_ids: Iterable[int], choice: int = 0, **more: Any) -> ProcessedOutputs:
        done = self.processor.process([TokenDelta(self.ids[choice], tuple(token_ids), **more)], now=20.0)
        self.outputs += done.outputs
        self.aborted += done.to_abort
        return done

    def feed_each(self, token_ids: Iterable[int], finish_reason: str | None = "length", **more: Any) -> None:
        *first, last = token_ids
        for token_id in first:
            self.feed([token_id])
        self.feed([last], finish_reason=finish_reason, **more)

    @property
    def choice(self) -> CompletionOutput:
        return self.outputs[-1].outputs[0]

    @property
    def deltas(self) -> list[str]:
        return [output.outputs[0].text for output in self.outputs]


# Stop strings


def first_end(text: str, stops: Iterable[str], free: int) -> tuple[int, str] | None:
    """By definition: the smallest end of any match after `free` characters, and of those the longest string."""
    ends = [(end, -len(stop), stop) for stop in stops for end in range(free + 1, len(text) + 1)
            if text[:end].endswith(stop)]
    if not ends:
        return None
    end, _, stop = min(ends)
    return end, stop


def longest_prefix(text: str, stops: Iterable[str]) -> int:
    """By definition: length of the longest suffix of the text that is a proper prefix of a stop string."""
    return max((size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0)


short_text = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


@given(chunks=st.lists(short_text), stops=stop_lists, free=st.sampled_from([0, 0, 1, 2]))
def test_stop_strings_by_definition(chunks: list[str], stops: list[str], free: int) -> None:
    """No stop string that ends in the first `free` chunks counts."""
    watch, released, text = StopStrings(stops), "", ""
    for number, chunk in enumerate(chunks):
        text += chunk
        decided, found = watch.add_text(chunk, number >= free)
        released += decided
        wanted = first_end(text, stops, len("".join(chunks[:free])))
        if wanted is not None:
            assert (len(released), found) == wanted and text.startswith(released)
            return
        assert found is None
        assert released == text[:len(text) - longest_prefix(text, stops)]
    assert released + watch.release() == text
    assert watch.release() == ""


@pytest.mark.parametrize(("text", "stops", "left", "found"), [
    ("hello world", ["wor"], "hello ", "wor"),
    ("hello world", ["world", "wor"], "hello ", "wor"),  # ends first, whatever the order
    ("hello world", ["wor", "world"], "hello ", "wor"),
    ("abc", ["b", "ab"], "", "ab"),  # both end there: no fragment is left
    ("xaabaab", ["aabaab"], "x", "aabaab"),
    ("aaab", ["aab"], "a", "aab"),
    ("a日b", ["日"], "a", "日"),
])
def test_a_stop_string_ends_the_text(text: str, stops: list[str], left: str, found: str) -> None:
    for keep in (False, True):
        run = Run(stop=stops, include_stop_str_in_output=keep)
        run.feed_each(char_ids(text + "and more"))
        assert run.choice.text == (left + found if keep else left)
        assert (run.choice.finish_reason, run.choice.stop_reason) == ("stop", found)
        assert run.outputs[-1].finished and run.aborted == run.ids
        # The last token is the one whose text completed the string.
        assert run.choice.token_ids == tuple(char_ids(left + found))


@pytest.mark.parametrize("least", range(7))
@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_stop_string_counts_only_behind_min_tokens(least: int, logprobs: int | None) -> None:
    """Also one that begins before: `ab` ends at tokens 2, 4 and 6."""
    end = next((end for end in (2, 4, 6) if end > least), None)
    for together in (False, True):
        run = Run(stop="ab", min_tokens=least, logprobs=logprobs)
        *chunks, last = [char_ids("ababab")] if together else [[char_id] for char_id in char_ids("ababab")]
        for chunk in chunks:
            run.feed(chunk, logprobs=(TokenLogprobs(-1.0, 1),) * len(chunk))
        run.feed(last, finish_reason="length", logprobs=(TokenLogprobs(-1.0, 1),) * len(last))
        assert run.choice.text == "ababab"[:end - 2 if end else 6]
        assert run.choice.finish_reason == ("stop" if end else "length") and len(run.choice.token_ids) == (end or 6)


def test_one_delta_of_many_tokens_stops_at_the_same_token() -> None:
    text = char_ids("hello world and more")
    alone, together = Run(stop="wor"), Run(stop="wor")
    alone.feed_each(text)
    together.feed(text)
    assert alone.choice == together.choice


def test_a_stop_string_inside_a_token() -> None:
    hello = BYTES.encode("hello")
    assert len(hello) == 1
    run = Run(stop="ell")
    run.feed(hello)
    assert (run.choice.text, run.choice.token_ids) == ("h", tuple(hello))
    run = Run(stop="ell", include_stop_str_in_output=True)
    run.feed(hello)
    assert run.choice.text == "hell"


def test_the_prompt_is_not_searched() -> None:
    run = Run(prompt=char_ids("stop"), stop=["stop", "op!"])
    run.feed_each(char_ids("! go"))
    assert (run.choice.text, run.choice.finish_reason) == ("! go", "length")


def test_held_back_text_is_released_once_decided() -> None:
    run = Run(stop="END", output_kind=RequestOutputKind.DELTA)
    run.feed_each(char_ids("aEbENc EN"))
    assert run.deltas == ["a", "", "Eb", "", "", "ENc", " ", "", "EN"]
    assert run.choice.finish_reason == "length"


def test_a_long_stop_string_holds_back_only_a_real_prefix() -> None:
    run = Run(stop="x" * 4000, output_kind=RequestOutputKind.DELTA)
    run.feed_each(char_ids("hello"))
    assert run.deltas == list("hello")


def test_the_search_takes_time_proportional_to_the_text() -> None:
    """The worst text for the worst strings; searching all held-back text at each step would take minutes."""
    stops = [number * "b" + "a" * (4096 - 64) + "c" for number in range(64)]
    watch = StopStrings(stops)
    start = time.perf_counter()
    for _ in range(3):
        for _ in range(4000):
            assert watch.add_text("a")[1] is None
        watch.add_text("b")
    assert time.perf_counter() - start < 10


def test_later_deltas_of_a_stopped_sequence_are_ignored() -> None:
    run = Run(stop="b")
    run.feed(char_ids("ab"))
    assert run.feed(char_ids("more")) == ProcessedOutputs()
    assert run.feed((), finish_reason="abort") == ProcessedOutputs()
    assert len(run.outputs) == 1 and run.processor.sequences("r") == ()


def test_stop_at_the_length_limit_needs_no_abort() -> None:
    run = Run(stop="b")
    run.feed(char_ids("ab"), finish_reason="length")
    assert (run.choice.text, run.choice.finish_reason, run.choice.stop_reason) == ("a", "stop", "b")
    assert run.aborted == []


def test_text_released_by_the_end_is_searched_too() -> None:
    run = Run(stop="\ufffd")
    run.feed([*char_ids("a"), *char_ids("日")[:1]], finish_reason="length")
    assert (run.choice.text, run.choice.finish_reason, run.choice.stop_reason) == ("a", "stop", "\ufffd")


# End tokens and stop tokens


@pytest.mark.parametrize("stop_reason", [None, END])
@pytest.mark.parametrize("skip", [True, False])
def test_the_end_token_is_an_id_and_not_text(stop_reason: int | None, skip: bool) -> None:
    run = Run(skip_special_tokens=skip)
    run.feed_each([*char_ids("ab"), END], "stop", stop_reason=stop_reason)
    assert (run.choice.text, run.choice.token_ids) == ("ab", (*char_ids("ab"), END))
    assert (run.choice.finish_reason, run.choice.stop_reason) == ("stop", stop_reason)
    assert run.aborted == []


def test_a_stop_token_shows_on_request() -> None:
    def text(stop: int, **params: Any) -> str:
        run = Run(**params)
        run.feed_each([*char_ids("ab"), stop], "stop", stop_reason=stop)
        return run.choice.text

    c = char_ids("c")[0]
    assert text(c) == "ab"
    assert text(c, include_stop_str_in_output=True) == "abc"
    assert text(END, include_stop_str_in_output=True) == "ab"
    assert text(END, include_stop_str_in_output=True, skip_special_tokens=False) == "ab<|end|>"


@pytest.mark.parametrize(("ids", "params", "text", "count"), [
    ("a*b", {}, "a", 2), ("ab*", {"stop": ["bc", "<|end|>"]}, "ab", 3),
    ("*a", {"include_stop_str_in_output": True}, "", 1),
    ("a*b*", {"min_tokens": 3}, "ab", 4), ("abc*", {"stop": ["bc", "<|end|>"]}, "a", 3),
    ("a*b", {"skip_special_tokens": False}, "a", 2),
    ("a*b", {"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<|end|>", 2),
])
def test_a_stop_string_that_is_a_special_tokens_text(ids: str, params: dict[str, Any], text: str, count: int) -> None:
    """`*` is the token; if it is hidden, it still ends the text and removes nothing from it."""
    run = Run(**{"stop": "<|end|>", "output_kind": RequestOutputKind.DELTA, **params})
    run.feed_each([END if char == "*" else char_ids(char)[0] for char in ids + "xyz"])
    assert "".join(run.deltas) == text
    assert run.choice.finish_reason == "stop" and run.choice.stop_reason in ("<|end|>", "bc") and run.aborted
    assert sum(len(output.outputs[0].token_ids) for output in run.outputs) == count


def test_an_end_token_releases_held_back_text() -> None:
    run = Run(stop="bcd", output_kind=RequestOutputKind.DELTA)
    run.feed_each([*char_ids("abc"), END], "stop")
    assert run.deltas == ["a", "", "", "bc"]


def test_a_character_cut_off_is_the_same_in_all_output_kinds() -> None:
    ids = char_ids("a日")[:-1]
    texts = set()
    for kind in RequestOutputKind:
        run = Run(output_kind=kind)
        run.feed_each(ids)
        texts.add("".join(run.deltas) if kind is RequestOutputKind.DELTA else run.choice.text)
    assert texts == {"a\ufffd"}


# Kinds of output


@given(text=st.text(max_size=20), stop=st.none() | st.lists(st.text(min_size=1, max_size=3), max_size=3),
       keep=st.booleans())
def test_all_output_kinds_agree(text: str, stop: list[str] | None, keep: bool) -> None:
    ids = char_ids(text + ".")
    runs = {kind: Run(stop=stop, include_stop_str_in_output=keep, output_kind=kind) for kind in RequestOutputKind}
    for run in runs.values():
        run.feed_each(ids)
    final = runs[RequestOutputKind.FINAL_ONLY]
    assert len(final.outputs) == 1
    assert runs[RequestOutputKind.CUMULATIVE].choice == final.choice
    delta = runs[RequestOutputKind.DELTA]
    assert "".join(delta.deltas) == final.choice.text
    assert sum((output.outputs[0].token_ids for output in delta.outputs), ()) == final.choice.token_ids
    assert (delta.choice.finish_reason, delta.choice.stop_reason) == (final.choice.finish_reason,
                                                                      final.choice.stop_reason)
    for run in runs.values():
        assert [output.finished for output in run.outputs] == [False] * (len(run.outputs) - 1) + [True]
        assert all(output.outputs[0].finish_reason is None for output in run.outputs[:-1])


def test_cumulative_outputs_grow() -> None:
    run = Run()
    run.feed_each(char_ids("abc"))
    assert [(output.outputs[0].text, len(output.outputs[0].token_ids)) for output in run.outputs] == [
        ("a", 1), ("ab", 2), ("abc", 3)]


def test_without_detokenizing() -> None:
    for run in (Run(detokenize=False), Run(tokenizer=None)):
        run.feed_each([5, 7, END], "stop")
        assert (run.choice.text, run.choice.token_ids, run.choice.finish_reason) == ("", (5, 7, END), "stop")
    with pytest.raises(RequestError, match="tokenizer"):
        Run(tokenizer=None, stop="a")


def test_outputs_repeat_the_request() -> None:
    run = Run(prompt=char_ids("pp"))
    run.feed_each(char_ids("a"))
    output = run.outputs[-1]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "p", tuple(char_ids("pp")))


def test_leading_spaces_of_word_start_markers_stay() -> None:
    tokenizer = wrap(sentencepiece_metadata())
    run = Run(tokenizer=tokenizer, prompt=tokenizer.encode("the"))
    run.feed_each(tokenizer.encode("hello world", False))
    assert run.choice.text == " hello world"


# Several choices


def test_choices_are_merged_into_one_request() -> None:
    run = Run(n=2)
    assert len(set(run.ids)) == 2
    done = run.processor.process([TokenDelta(run.ids[1], tuple(char_ids("x"))), TokenDelta(run.ids[0], ())], now=20.0)
    (output,) = done.outputs
    assert [(choice.index, choice.text) for choice in output.outputs] == [(0, ""), (1, "x")]
    run.feed(char_ids("ab"), 0, finish_reason="length")
    assert not run.outputs[-1].finished and run.outputs[-1].outputs[0].finish_reason == "length"
    done = run.feed([END], 1, finish_reason="stop")
    assert run.outputs[-1].finished
    ends = [(choice.text, choice.finish_reason) for choice in run.outputs[-1].outputs]
    assert ends == [("ab", "length"), ("x", "stop")]
    (ended,) = done.finished
    assert (ended.request_id, ended.finish_reason) == ("r", "stop")


def test_deltas_show_only_choices_with_new_output() -> None:
    run = Run(n=3, output_kind=RequestOutputKind.DELTA)
    run.feed(char_ids("a"), 2)
    assert [choice.index for choice in run.outputs[-1].outputs] == [2]


def test_final_only_waits_for_all_choices() -> None:
    run = Run(n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    assert run.feed(char_ids("a"), 0, finish_reason="length").outputs == []
    assert len(run.feed(char_ids("b"), 1, finish_reason="length").outputs) == 1


def test_each_choice_stops_by_itself() -> None:
    run = Run(n=2, stop="!")
    run.feed(char_ids("a!"), 0)
    assert run.aborted == [run.ids[0]]
    run.feed(char_ids("b"), 1)
    assert not run.outputs[-1].finished
    run.feed(char_ids("!"), 1)
    assert [choice.text for choice in run.outputs[-1].outputs] == ["a", "b"]


def test_sequence_ids_are_unambiguous() -> None:
    processor, params = OutputProcessor(None), SamplingParams(n=2)
    ids = [processor.add_request(name, None, [1], params, 0.0) for name in ("a", "a#0", "a#0#0")]
    assert len({*ids[0], *ids[1], *ids[2]}) == 6


def test_a_request_id_is_used_once_at_a_time() -> None:
    run = Run()
    with pytest.raises(RequestError) as caught:
        run.processor.add_request("r", None, [1], SamplingParams(), 0.0)
    assert caught.value.param == "request_id"
    run.feed(char_ids("a"), finish_reason="length")
    assert run.processor.add_request("r", None, [1], SamplingParams(), 0.0)


# Aborts and errors


def test_abort() -> None:
    run = Run(n=2)
    run.feed(char_ids("a"), 0, finish_reason="length")
    assert run.processor.abort("r") == [run.ids[1]]
    assert run.processor.abort("r") == run.processor.abort("unknown") == []
    assert run.feed(char_ids("a"), 1) == ProcessedOutputs()
    assert run.processor.sequences("r") == ()


def test_the_engines_abort_and_error_are_passed_on() -> None:
    run = Run()
    run.feed(char_ids("a"))
    done = run.feed((), finish_reason="abort")
    assert (run.choice.text, run.choice.finish_reason, done.to_abort) == ("a", "abort", [])
    run = Run()
    done = run.feed((), finish_reason="error", error="the logits are not finite")
    assert (run.choice.finish_reason, done.errors) == ("error", {"r": "the logits are not finite"})
    assert done.finished[0].finish_reason == "error"


@pytest.mark.parametrize("bad", [(-1,), ("x",), (None,), (2**70,), 5])
def test_a_bad_delta_fails_only_its_request(bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    processor = OutputProcessor(BYTES)
    one, two = (processor.add_request(name, None, PROMPT, SamplingParams(n=2), 0.0) for name in ("one", "two"))
    good = tuple(char_ids("a"))
    done = processor.process([TokenDelta(two[0], good), TokenDelta(one[0], bad), TokenDelta(one[1], good),
                              TokenDelta(two[1], good)])
    by_id = {output.request_id: output for output in done.outputs}
    assert [choice.finish_reason for choice in by_id["one"].outputs] == ["error", "error"]
    assert by_id["one"].finished and set(done.errors) == {"one"} and set(done.to_abort) == set(one)
    assert [choice.text for choice in by_id["two"].outputs] == ["a", "a"] and not by_id["two"].finished
    assert processor.sequences("one") == () and processor.sequences("two") == tuple(two)
    assert "one" in caplog.text


# Figures


def test_times_and_counts() -> None:
    processor = OutputProcessor(BYTES)
    one, two = processor.add_request("r", None, PROMPT, SamplingParams(n=2), 10.0)
    first = processor.process([TokenDelta(one, tuple(char_ids("ab")), num_cached_tokens=16, scheduled_time=12.0)], 13.0)
    assert [(new.choice, new.count, new.num_cached_tokens) for new in first.new_tokens] == [(0, 2, 16)]
    processor.process([TokenDelta(two, tuple(char_ids("a")), scheduled_time=11.0, num_preemptions=1)], 14.0)
    done = processor.process([TokenDelta(one, tuple(char_ids("c")), "length"),
                              TokenDelta(two, (), "length", num_preemptions=2)], 15.0)
    assert [(new.choice, new.count) for new in done.new_tokens] == [(0, 1)]
    metrics = done.outputs[0].metrics
    assert metrics is not None and done.finished[0].metrics == metrics
    assert (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time) == (10.0, 11.0, 13.0)
    assert (metrics.last_token_time, metrics.finished_time, metrics.num_preemptions) == (15.0, 15.0, 2)
    assert done.outputs[0].num_cached_tokens == 16


def test_the_clock_is_the_monotonic_one() -> None:
    processor = OutputProcessor(BYTES)
    (sequence,) = processor.add_request("r", None, PROMPT, SamplingParams(), time.monotonic())
    (output,) = processor.process([TokenDelta(sequence, tuple(char_ids("a")))]).outputs
    assert output.metrics is not None and output.metrics.first_token_time is not None
    assert math.isclose(output.metrics.first_token_time, time.monotonic(), abs_tol=60)


def test_tokens_cut_off_at_a_stop_string_are_not_counted() -> None:
    run = Run(stop="b")
    done = run.feed(char_ids("abcd"))
    assert [new.count for new in done.new_tokens] == [2]


def test_the_real_model(smollm2_path: Path) -> None:
    from jaxpaged.text.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(smollm2_path)
    text = " naïve 日本語 👍🏽 text\n\nUser: no more"
    run = Run(tokenizer, tokenizer.encode("A"), stop=["\n\nUser:"], output_kind=RequestOutputKind.DELTA)
    for token_id in tokenizer.encode(text):
        run.feed([token_id])
    assert "".join(run.deltas) == " naïve 日本語 👍🏽 text"
    assert run.choice.stop_reason == "\n\nUser:"
