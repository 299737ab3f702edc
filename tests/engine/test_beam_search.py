"""Beam search against that of transformers, on random weights and on real ones."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.core.errors import RequestError
from tests.support.tiny_llama import ENGINE_ARGS, EOS, random_prompt, write_model

if TYPE_CHECKING:
    from tests.support.reference_model import ReferenceModel


def open_reference(path: Path) -> "ReferenceModel":
    pytest.importorskip("torch", reason="the reference, transformers, needs torch")
    from tests.support.reference_model import ReferenceModel

    return ReferenceModel(path)


def reference(model: "ReferenceModel", prompt: Sequence[int], width: int, max_tokens: int, eos: list[int] | None,
              length_penalty: float = 1.0, early_stopping: bool | str = False) -> list[tuple[list[int], float]]:
    """Generated ids and scores of transformers' beams, the best first."""
    import torch

    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        found = model.model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, do_sample=False,
            max_new_tokens=max_tokens, length_penalty=length_penalty, early_stopping=early_stopping, eos_token_id=eos,
            pad_token_id=0, return_dict_in_generate=True, output_scores=True)
    beams = []
    for row, indices, score in zip(found.sequences.tolist(), found.beam_indices.tolist(),
                                   found.sequences_scores.tolist(), strict=True):
        length = sum(index >= 0 for index in indices)
        beams.append((row[len(prompt) : len(prompt) + length], score))
    return beams


def check(llm: LLM, model: "ReferenceModel", prompts: Sequence[Sequence[int]], width: int, max_tokens: int,
          eos: list[int] | None, **more: Any) -> None:
    outputs = llm.beam_search([list(prompt) for prompt in prompts], width, max_tokens, ignore_eos=eos is None,
                              use_tqdm=False, **more)
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = reference(model, prompt, width, max_tokens, eos, **more)
        assert output.finished and len(output.outputs) == width
        for choice, (ids, score) in zip(output.outputs, wanted, strict=True):
            assert choice.cumulative_logprob is not None
            ours = choice.cumulative_logprob / len(choice.token_ids) ** more.get("length_penalty", 1.0)
            assert ours == pytest.approx(score, abs=1e-3), "a beam with another score"
            if list(choice.token_ids) != ids:  # two beams of the same score may be swapped
                assert any(abs(score - other) < 1e-3 and list(choice.token_ids) == beam for beam, other in wanted)
            ended = eos is not None and choice.token_ids[-1] in eos
            assert choice.finish_reason == ("stop" if ended else "length")


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("beams") / "model")


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> "ReferenceModel":
    return open_reference(tiny_path)


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), **ENGINE_ARGS) as llm:
        yield llm
        assert llm.get_metrics()["vllm:kv_cache_usage_perc"] == 0


# Ways to search, and the width with which the quick tests try each.
SEARCHES: list[tuple[dict[str, Any], int]] = [
    ({}, 2), ({"length_penalty": 0.0}, 4), ({"length_penalty": 2.0, "early_stopping": "never"}, 6),
    ({"early_stopping": True}, 4), ({"length_penalty": -1.0}, 2)]


@pytest.mark.parametrize(("more", "width"), [
    pytest.param(more, width, marks=[pytest.mark.slow] * (width != quick), id=f"{more}-{width}")
    for more, quick in SEARCHES for width in (2, 4, 6)])
def test_beams_are_those_of_transformers(llm: LLM, tiny: "ReferenceModel", more: dict[str, Any], width: int) -> None:
    """Some end by an end token: half of all ids are."""
    prompts = [random_prompt(length, length) for length in (3, 17, 40)]
    check(llm, tiny, prompts, width, 8, [EOS], **more)
    check(llm, tiny, prompts, width, 5, None, **more)


def test_one_beam_is_greedy(llm: LLM) -> None:
    prompt = random_prompt(20, 1)
    [beam] = llm.beam_search([prompt], 1, 12, ignore_eos=True, use_tqdm=False)
    [greedy] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert beam.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_beams_beside_other_requests_and_in_a_small_pool(tiny_path: Path, tiny: "ReferenceModel") -> None:
    with LLM(str(tiny_path), **ENGINE_ARGS | {"max_num_batched_tokens": 7, "num_gpu_blocks_override": 10}) as llm:
        beams = SamplingParams(n=2, best_of=4, use_beam_search=True, max_tokens=10, ignore_eos=True, logprobs=0)
        plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        prompts = [random_prompt(30, seed) for seed in range(4)]
        outputs = llm.generate(prompts, [beams, plain, beams, plain], use_tqdm=False)
        for prompt, output in list(zip(prompts, outputs, strict=True))[::2]:
            wanted = reference(tiny, prompt, 4, 10, None)[:2]
            assert [list(choice.token_ids) for choice in output.outputs] == [ids for ids, _ in wanted]


@pytest.mark.parametrize("params", [
    {"n": 17}, {"n": 1, "best_of": 17}, {"presence_penalty": 1.0}, {"min_tokens": 2}, {"prompt_logprobs": 1},
    {"early_stopping": "soon"}, {"length_penalty": float("nan")},
], ids=str)
def test_searches_that_cannot_be_done_are_refused(llm: LLM, params: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        llm.generate([[1, 2]], SamplingParams(**{"n": 2, "use_beam_search": True, "max_tokens": 4} | params),
                     use_tqdm=False)


@pytest.mark.slow
def test_beams_on_real_weights(smollm2_path: Path) -> None:
    model = open_reference(smollm2_path)
    with LLM(max_num_seqs=8, max_num_batched_tokens=64) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer.encode(text) for text in (
            "The capital of France is", "Once upon a time there was a", "def fibonacci(n):\n")]
        for width, more in ((2, {}), (4, {"length_penalty": 0.6}), (6, {"early_stopping": True})):
            check(llm, model, prompts, width, 24, sorted(llm._front.inputs.eos_token_ids), **more)
