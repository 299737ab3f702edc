"""Log probabilities from the device to the outputs, against a softmax in float64 NumPy."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.messages import TokenLogprobs
from jaxpaged.core.outputs import CompletionOutput
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.llm import LLM
from jaxpaged.execution.logprobs import packed_logprobs, unpack_row
from tests.support.tiny_llama import CONFIG, ENGINE_ARGS, Reference, random_prompt, random_weights

REFERENCE = Reference(CONFIG, random_weights())
TOLERANCE = 1e-4
VOCAB, NUM_TOP, ROWS = 67, 9, 4

run_packed = jax.jit(packed_logprobs, static_argnums=2)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    highest = logits.max(axis=-1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True))


@given(st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 30.0]), st.floats(0, 0.9))
def test_logprobs_and_ranks_are_those_of_a_softmax(seed: int, spread: float, banned: float) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(0, spread, (ROWS, VOCAB)).astype(np.float32)
    logits[random.random(logits.shape) < banned] = -np.inf
    ids = random.integers(0, VOCAB, ROWS).astype(np.int32)
    logits[range(ROWS), ids] = random.normal(0, spread, ROWS)
    packed = np.asarray(run_packed(logits, ids, NUM_TOP))
    wanted = log_softmax(logits)
    for row, token in enumerate(ids):
        found = unpack_row(packed[row], NUM_TOP)
        assert found.logprob == pytest.approx(wanted[row, token], abs=TOLERANCE)
        assert found.rank == 1 + (logits[row] > logits[row, token]).sum()
        best = np.sort(wanted[row])[::-1][:NUM_TOP]
        values = [value for _, value in found.top]
        assert np.allclose(values, best, atol=TOLERANCE)
        assert all(wanted[row, other] == pytest.approx(value, abs=TOLERANCE) for other, value in found.top)
        assert len({other for other, _ in found.top}) == NUM_TOP
        assert unpack_row(packed[row], 2) == TokenLogprobs(found.logprob, found.rank, found.top[:2])


PROMPTS = [random_prompt(length, length) for length in (1, 15, 16, 40, 70, 33)]
PARAMS = [
    SamplingParams(temperature=0, logprobs=5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(logprobs=0, seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(logprobs=20, seed=2, temperature=2.0, top_k=10, top_p=0.9, max_tokens=40, ignore_eos=True),
    SamplingParams(logprobs=1, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=40, ignore_eos=True),
]


def run(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[CompletionOutput]:
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def check(prompt: Sequence[int], output: CompletionOutput, count: int) -> None:
    """Every position: the chosen token first, then the best `count`, by the reference."""
    wanted = log_softmax(REFERENCE.logits([*prompt, *output.token_ids])[len(prompt) - 1 : -1])
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == len(output.text_offsets)
    for row, token, entry in zip(wanted, output.token_ids, output.logprobs, strict=True):
        ids = list(entry)
        assert ids[0] == token and count <= len(ids) <= count + 1
        for other, item in entry.items():
            assert item.logprob == pytest.approx(row[other], abs=TOLERANCE)
            clearly_above, at_most_above = (row > row[other] + TOLERANCE).sum(), (row > row[other] - TOLERANCE).sum()
            assert item.rank is not None and 1 + clearly_above <= item.rank <= max(at_most_above, 1)
        best = np.sort(row)[::-1][:count]
        assert np.allclose(sorted((item.logprob for item in entry.values()), reverse=True)[:count], best,
                           atol=TOLERANCE)
    assert output.cumulative_logprob == pytest.approx(
        sum(row[token] for row, token in zip(wanted, output.token_ids, strict=True)), abs=1e-3)


def test_logprobs_are_the_models_own_before_temperature_and_cuts(llm: LLM, few_blocks: LLM) -> None:
    """In a batch where others want none, alone, and with preemptions; no request's ids change."""
    bare = run(llm, PROMPTS, [replace(params, logprobs=None) for params in PARAMS])
    assert all(output.logprobs is None and output.cumulative_logprob is None for output in bare)
    for found in (run(llm, PROMPTS, PARAMS), run(few_blocks, PROMPTS, PARAMS)):
        assert [output.token_ids for output in found] == [output.token_ids for output in bare]
        for prompt, params, output in zip(PROMPTS, PARAMS, found, strict=True):
            if params.logprobs is None:
                assert output.logprobs is None and not output.text_offsets
            else:
                check(prompt, output, params.logprobs)
    assert few_blocks.get_metrics()["vllm:num_preemptions"] > 0
    check(PROMPTS[0], run(llm, PROMPTS[:1], PARAMS[:1])[0], 5)


def test_processed_logprobs_are_those_of_what_is_drawn_from(model_path: Path) -> None:
    with LLM(str(model_path), **ENGINE_ARGS, logprobs_mode="processed_logprobs") as llm:
        greedy, cut = run(llm, [PROMPTS[0], PROMPTS[3]], [PARAMS[0], PARAMS[3]])
    check(PROMPTS[0], greedy, 5)
    logits = REFERENCE.logits([*PROMPTS[3], *cut.token_ids])[len(PROMPTS[3]) - 1 : -1]
    assert cut.logprobs is not None
    for row, token, entry in zip(logits, cut.token_ids, cut.logprobs, strict=True):
        kept = [other for other, item in entry.items() if item.logprob > -np.inf]
        probabilities = np.exp([entry[other].logprob for other in kept])
        assert token in kept and len(kept) <= 10
        # what top_k and top_p left has a probability of 1 together, and the proportions of the softmax at temperature 2
        assert probabilities.sum() == pytest.approx(1, abs=1e-3)
        gaps = np.log(probabilities) - (row[kept] - row[token]) / 2
        assert np.allclose(gaps, entry[token].logprob, atol=1e-3)


def test_text_offsets_say_where_each_token_begins(llm: LLM) -> None:
    [output] = run(llm, PROMPTS[2:3], [PARAMS[2]])
    tokenizer = llm.get_tokenizer()
    assert output.text_offsets[0] == 0 and output.logprobs is not None
    for index, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        before = tokenizer.decode([*output.token_ids[:index]]).rstrip("\ufffd")
        assert output.text_offsets[index] >= len(before)
        assert entry[token].decoded_token == tokenizer.decode([token])
    assert list(output.text_offsets) == sorted(output.text_offsets)
    assert output.text_offsets[-1] <= len(output.text)


def test_a_stop_string_cuts_the_logprobs_with_the_ids(llm: LLM) -> None:
    params = SamplingParams(temperature=0, logprobs=1, max_tokens=20)
    [full] = run(llm, ["abc"], [params])
    char = next(char for char in full.text[3:] if char != "\ufffd")
    [cut] = run(llm, ["abc"], [SamplingParams(temperature=0, logprobs=1, max_tokens=20, stop=char)])
    assert cut.finish_reason == "stop" and cut.logprobs is not None and full.logprobs is not None
    assert len(cut.logprobs) == len(cut.token_ids) == len(cut.text_offsets) <= len(full.logprobs)
    assert cut.cumulative_logprob == pytest.approx(sum(
        entry[token].logprob for token, entry in zip(cut.token_ids, cut.logprobs, strict=True)))


def test_the_best_of_several_choices_are_returned(llm: LLM) -> None:
    """Those with the highest cumulative log probability of all that the same seed draws."""
    params = SamplingParams(n=6, seed=3, max_tokens=12, ignore_eos=True, logprobs=0)
    [every] = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    wanted = sorted(every.outputs, key=lambda output: -(output.cumulative_logprob or 0))[:2]
    for logprobs in (0, None):
        best = replace(params, n=2, best_of=6, logprobs=logprobs)
        [found] = llm.generate([PROMPTS[1]], best, use_tqdm=False)
        assert [output.token_ids for output in found.outputs] == [output.token_ids for output in wanted]
        assert [output.index for output in found.outputs] == [0, 1]
        assert all((output.logprobs is None) == (logprobs is None) for output in found.outputs)


@pytest.mark.parametrize("count", [21, 257, 10**6])
def test_more_alternatives_than_allowed(llm: LLM, count: int) -> None:
    with pytest.raises(ValueError, match="at most 20") as caught:
        run(llm, PROMPTS[:1], [SamplingParams(logprobs=count)])
    assert caught.value.param == "logprobs"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_limit_can_be_raised(model_path: Path) -> None:
    with LLM(str(model_path), **ENGINE_ARGS, max_logprobs=100) as llm:
        params = SamplingParams(logprobs=100, temperature=0, max_tokens=3)
        check(PROMPTS[1], run(llm, PROMPTS[1:2], [params])[0], 100)
