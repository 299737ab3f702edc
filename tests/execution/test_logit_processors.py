"""Penalties, biases and forbidden tokens against float64 NumPy, against transformers, and through the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.messages import EngineRequest
from jaxpaged.core.outputs import CompletionOutput
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.llm import LLM
from jaxpaged.execution.logit_processors import (
    ProcessorState,
    neutral_processors,
    note_tokens,
    process_logits,
    processors_of,
    token_bits,
)
from tests.support.tiny_llama import CONFIG, EOS, Reference, random_prompt, random_weights

REFERENCE = Reference(CONFIG, random_weights())
VOCAB, SLOTS = 70, 6
WORDS = -(-VOCAB // 32)

run_process, run_note = jax.jit(process_logits), jax.jit(note_tokens)


@dataclass(frozen=True)
class Row:
    """A request and the tokens that it has."""

    request: EngineRequest
    prompt: list[int]
    output: list[int]


def naive(row: Row, logits: np.ndarray) -> np.ndarray:
    """One token after another, in float64."""
    params, changed = row.request.params, logits.astype(np.float64)
    for token in range(len(logits)):
        count = row.output.count(token)
        if count or token in row.prompt:
            changed[token] *= params.repetition_penalty ** (-1 if changed[token] > 0 else 1)
        changed[token] -= count * params.frequency_penalty + bool(count) * params.presence_penalty
        bias = (params.logit_bias or {}).get(token, 0)
        changed[token] += -np.inf if bias == -100 else 1e4 if bias == 100 else bias
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            changed[token] = -np.inf
        if token in row.request.stop_token_ids and len(row.output) < params.min_tokens:
            changed[token] = -np.inf
    for word in row.request.bad_word_ids:
        if row.output[len(row.output) - len(word) + 1 :] == list(word[:-1]) and len(row.output) >= len(word) - 1:
            changed[word[-1]] = -np.inf
    return changed


tokens = st.integers(0, 9)  # few, so that they repeat
params_strategy = st.fixed_dictionaries({}, optional={
    "presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 10),
    "logit_bias": st.dictionaries(tokens, st.one_of(st.just(-100), st.just(100), st.floats(-90, 90)), max_size=5),
    "allowed_token_ids": st.lists(tokens, min_size=1), "min_tokens": st.integers(0, 6),
})
rows_strategy = st.builds(
    lambda params, words, stops, prompt, output: Row(
        EngineRequest("r", tuple(prompt), SamplingParams(**params), 20, frozenset(stops),
                      bad_word_ids=tuple(map(tuple, words))), prompt, output),
    params_strategy, st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=6), st.sets(tokens, max_size=3),
    st.lists(tokens, min_size=1, max_size=8), st.lists(tokens, max_size=8))


def state_with(rows: dict[int, Row], already: int = 1000) -> ProcessorState:
    """The state of all slots, these rows admitted with their first `already` output tokens."""
    state: Any = neutral_processors(SLOTS, VOCAB)
    for slot, row in rows.items():
        new = processors_of(row.request, row.prompt, row.output[:already], VOCAB)
        state = jax.tree.map(lambda leaf, value, slot=slot: _with(leaf, slot, value[0]), state, new)
    return state


def _with(leaf: np.ndarray, slot: int, value: np.ndarray) -> np.ndarray:
    leaf = leaf.copy()
    leaf[slot] = value
    return leaf


@settings(max_examples=40)
@given(st.lists(rows_strategy, min_size=3, max_size=3), st.integers(0, 2**31), st.integers(0, 4))
def test_each_row_is_changed_as_its_request_says(rows: list[Row], seed: int, already: int) -> None:
    """Admitted with some of its tokens, the others noted one by one; rows without a request in stale slots stay."""
    slots = np.array([4, 0, 2, 5, 4], np.int32)  # two more rows: one in a stale slot, one that has none of its own
    active = np.array([True, True, True, False, False])
    state: Any = state_with(dict(zip(slots.tolist(), [*rows, rows[0]], strict=False)), already)
    for step in range(already, 8):
        ids = [row.output[step] if step < len(row.output) else -1 for row in rows] + [3, 3]
        state = run_note(state, slots, active, np.array(ids, np.int32))
    logits = np.random.default_rng(seed).normal(0, 5, (5, VOCAB)).astype(np.float32)
    position = np.array([len(row.prompt) + len(row.output) for row in rows] + [0, 0], np.int32)
    everything = np.full((5, WORDS), 0xFFFFFFFF, np.uint32)
    found = np.asarray(run_process(logits, state, slots, active, position, everything))
    for row, before, after in zip(rows, logits, found, strict=False):
        wanted = naive(row, before)
        assert (np.isinf(wanted) == np.isinf(after)).all()
        finite = np.isfinite(wanted)
        assert np.allclose(after[finite], wanted[finite], rtol=1e-5, atol=2e-3)
    assert (found[3:] == logits[3:]).all(), "a row without a request of its own was changed"


def test_a_mask_of_the_step_counts_in_every_row() -> None:
    logits = np.ones((2, VOCAB), np.float32)
    allowed = np.stack([token_bits([0, 31, 32, 69], VOCAB), np.full(WORDS, 0xFFFFFFFF, np.uint32)])
    found = np.asarray(run_process(logits, neutral_processors(SLOTS, VOCAB), np.zeros(2, np.int32),
                                   np.zeros(2, bool), np.zeros(2, np.int32), allowed))
    assert np.flatnonzero(np.isfinite(found[0])).tolist() == [0, 31, 32, 69] and np.isfinite(found[1]).all()


@pytest.mark.parametrize("penalty", [0.5, 1.3, 7.0])
def test_transformers_penalizes_repetition_alike(penalty: float) -> None:
    torch = pytest.importorskip("torch", reason="transformers' processors need torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = np.random.default_rng(0).normal(0, 5, VOCAB).astype(np.float32)
    row = Row(EngineRequest("r", (1, 2, 3), SamplingParams(repetition_penalty=penalty), 5), [1, 2, 3], [5, 2, 60])
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([row.prompt + row.output]), torch.tensor(logits[None].copy()))
    found = run_process(logits[None], state_with({0: row}), np.zeros(1, np.int32), np.ones(1, bool),
                        np.array([6], np.int32), np.full((1, WORDS), 0xFFFFFFFF, np.uint32))
    assert np.allclose(found, wanted.numpy(), rtol=1e-6)


# Through the engine


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **more})


REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (random_prompt(5, 1), greedy()),
    (random_prompt(20, 2), greedy(frequency_penalty=0.7, presence_penalty=0.4)),
    (random_prompt(33, 3), greedy(repetition_penalty=1.8)),
    (random_prompt(9, 4), greedy(logit_bias={7: 3.5, 9: -100, 11: 2})),
    (random_prompt(40, 5), greedy(allowed_token_ids=list(range(0, 250, 3)), presence_penalty=-1.5)),
    (random_prompt(2, 6), greedy(frequency_penalty=-2.0, logprobs=2)),
    (random_prompt(17, 7), SamplingParams(seed=5, max_tokens=40, ignore_eos=True)),
]


def run(llm: LLM, requests: Sequence[tuple[Any, SamplingParams]]) -> list[CompletionOutput]:
    prompts, params = zip(*requests, strict=True)
    return [output.outputs[0] for output in llm.generate(list(prompts), list(params), use_tqdm=False)]


def follows(prompt: list[int], params: SamplingParams, ids: Sequence[int]) -> None:
    """Every greedy choice is the best, or nearly, of the reference's logits after `naive` has changed them."""
    logits = REFERENCE.logits([*prompt, *ids])[len(prompt) - 1 : -1]
    request = EngineRequest("r", tuple(prompt), params, 40)
    for step, token in enumerate(ids):
        changed = naive(Row(request, prompt, list(ids[:step])), logits[step])
        assert changed[token] >= changed.max() - 2e-3, f"step {step}"


def test_in_mixed_batches_alone_and_after_preemption(llm: LLM, few_blocks: LLM) -> None:
    """Each request gets what it asks for, its neighbors what they would get without it."""
    together = run(llm, REQUESTS)
    plain = run(llm, [REQUESTS[0], REQUESTS[-1]])
    assert [output.token_ids for output in plain] == [together[0].token_ids, together[-1].token_ids]
    for found in (together, run(few_blocks, REQUESTS), [run(llm, [item])[0] for item in REQUESTS]):
        for (prompt, params), output in zip(REQUESTS, found, strict=True):
            assert len(output.token_ids) == 40
            if params.temperature == 0:
                follows(prompt, params, output.token_ids)
        assert found[-1].token_ids == together[-1].token_ids
    assert few_blocks.get_metrics()["vllm:num_preemptions"] > 0
    assert len({output.token_ids for output in together}) == len(together)


def test_a_slot_forgets_who_had_it(llm: LLM) -> None:
    wanted = run(llm, REQUESTS[:1] * 4)
    run(llm, [(prompt, greedy(logit_bias={3: 100}, bad_words=["a"])) for prompt, _ in REQUESTS])
    mixed = run(llm, [*REQUESTS[:1] * 3, REQUESTS[1]])
    assert [output.token_ids for output in mixed[:3]] == [output.token_ids for output in wanted[:3]]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_the_largest_biases_decide(llm: LLM, temperature: float) -> None:
    force = SamplingParams(temperature=temperature, logit_bias={65: 100}, max_tokens=12, seed=1)
    ban = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(10, 257), -100), max_tokens=12, seed=1)
    forced, banned, free = run(llm, [([1, 2], force), ([1, 2], ban), REQUESTS[0]])
    assert forced.token_ids == (65,) * 12
    assert set(banned.token_ids) <= set(range(10))
    follows(*REQUESTS[0], free.token_ids)


def test_bad_words_of_one_and_several_tokens(llm: LLM) -> None:
    """Each token of this model is a byte, so a word of three letters has three tokens."""
    tokens = [llm.get_tokenizer().encode(char)[0] for char in "abc"]
    only = SamplingParams(allowed_token_ids=tokens, max_tokens=60, seed=3, ignore_eos=True)
    free, banned, single = run(llm, [([5], only), ([5], replace(only, bad_words=["ab", "cca"])),
                                     ([5], replace(only, bad_words=["b"]))])
    assert "ab" in free.text and "cca" in free.text
    assert "ab" not in banned.text and "cca" not in banned.text and {"a", "b", "c"} == set(banned.text)
    assert set(single.text) == {"a", "c"}


def test_min_tokens_holds_back_every_kind_of_end(llm: LLM) -> None:
    [free] = run(llm, [([1, 2, 3], greedy(max_tokens=20))])
    stop = next(char for char in free.text if char != "\ufffd")
    cases: list[dict[str, Any]] = [
        {"stop_token_ids": [free.token_ids[0]]}, {"stop": stop}, {"logit_bias": {EOS: 100}, "ignore_eos": False}]
    for early in cases:
        at_once, late = run(llm, [([1, 2, 3], greedy(**{"max_tokens": 20, **early})),
                                  ([1, 2, 3], greedy(**{"max_tokens": 20, **early}, min_tokens=12))])
        assert at_once.finish_reason == "stop" and len(at_once.token_ids) < 12
        assert len(late.token_ids) > 12 or late.finish_reason == "length"
        if "logit_bias" in early:
            assert len(late.token_ids) == 13 and late.token_ids[-1] == EOS and EOS not in late.token_ids[:-1]


def test_where_everything_is_forbidden_the_text_ends(llm: LLM) -> None:
    """It is an error of neither the model nor the server."""
    params = greedy(allowed_token_ids=[5], bad_words=[llm.get_tokenizer().decode([5]) * 2])
    [cut, other] = run(llm, [([1], params), REQUESTS[0]])
    assert (cut.token_ids, cut.finish_reason) == ((5,), "stop")
    follows(*REQUESTS[0], other.token_ids)


@pytest.mark.parametrize("more", [
    {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300}, {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"logit_bias": dict.fromkeys(range(257), 50.0)}, {"temperature": 1e-40, "repetition_penalty": 1e30},
], ids=str)
def test_extreme_values_stay_finite(llm: LLM, more: dict[str, Any]) -> None:
    [output] = run(llm, [([1, 2], greedy(**{**more, "logprobs": 3, "max_tokens": 8}))])
    assert output.finish_reason == "length" and len(output.token_ids) == 8
    assert all(np.isfinite(item.logprob) for entry in output.logprobs or () for item in entry.values())


@pytest.mark.parametrize(("field", "value"), [
    ("logit_bias", {257: 1}), ("allowed_token_ids", [300]), ("bad_words", ["x" * 40]), ("min_tokens", 5),
])
def test_what_the_model_cannot_do(llm: LLM, field: str, value: Any) -> None:
    params = SamplingParams(**{"max_tokens": None if field == "min_tokens" else 4, field: value})
    prompt = random_prompt(125, 1) if field == "min_tokens" else [1]
    with pytest.raises(ValueError) as caught:
        run(llm, [(prompt, params)])
    assert caught.value.param == field  # type: ignore[attr-defined]


def test_nothing_is_compiled_for_any_of_it(llm: LLM) -> None:
    before = llm.get_metrics()["jaxpaged:compilations"]
    run(llm, [(prompt, replace(params, logprobs=4)) for prompt, params in REQUESTS])
    assert llm.get_metrics()["jaxpaged:compilations"] == before
