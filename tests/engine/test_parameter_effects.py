"""Every sampling parameter changes what a request returns: none is accepted without effect."""

from dataclasses import fields
from typing import Any

from jaxpaged import LLM, SamplingParams
from jaxpaged.core.compatibility import BEAM_SEARCH_IGNORES, PARAMS_WITHOUT_EFFECT
from jaxpaged.core.sampling_params import StructuredOutputsParams
from tests.support.live_server import ROOT
from tests.support.tiny_llama import EOS

PROMPT = "hello there"
LETTERS = "abcdefgh"
# The tests in these files show the effect of these.
ELSEWHERE = {"length_penalty": "engine/test_beam_search.py", "early_stopping": "engine/test_beam_search.py",
             "expected_output_tokens": "scheduling/test_policy.py", "output_kind": "engine/test_async_llm.py"}


def result(llm: LLM, params: dict[str, Any]) -> Any:
    [output] = llm.generate(PROMPT, SamplingParams(**params), use_tqdm=False)
    return output.prompt_logprobs is None, [
        (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, choice.logprobs is None)
        for choice in output.outputs]


def test_every_sampling_parameter_has_an_effect(llm: LLM) -> None:
    letters = llm.get_tokenizer().encode(LETTERS)
    free: dict[str, Any] = {"temperature": 4.0, "seed": 1, "max_tokens": 24, "allowed_token_ids": letters}
    ending: dict[str, Any] = {"temperature": 4.0, "seed": 1, "max_tokens": 6, "logit_bias": {EOS: 100}}
    _, [(text, ids, *_)] = result(llm, free)
    assert len(set(text)) > 4  # enough to ban, to stop at and to repeat
    cases: dict[str, tuple[dict[str, Any], Any]] = {
        "n": (free, 2), "best_of": (free, 4), "presence_penalty": (free, 2.0), "frequency_penalty": (free, 2.0),
        "repetition_penalty": (free, 3.0), "temperature": (free, 0.0), "top_p": (free, 1e-6), "top_k": (free, 1),
        "min_p": (free, 1.0), "seed": (free, 2), "stop": (free, text[2]), "stop_token_ids": (free, [ids[2]]),
        "ignore_eos": (ending, True), "max_tokens": (free, 3), "min_tokens": (ending, 4), "logprobs": (free, 1),
        "prompt_logprobs": (free, 1), "detokenize": (free, False),
        "skip_special_tokens": ({**ending, "ignore_eos": True}, False),
        "include_stop_str_in_output": ({**free, "stop": text[2]}, True), "logit_bias": (free, {letters[0]: 100}),
        "allowed_token_ids": (free, letters[:2]), "bad_words": (free, [text[0]]),
        "structured_outputs": ({**free, "allowed_token_ids": None}, StructuredOutputsParams(choice=["abc"])),
        "use_beam_search": ({"n": 2, "max_tokens": 6, "seed": 1, "temperature": 4.0}, True),
    }
    known = {item.name for item in fields(SamplingParams)}
    assert all(name in (ROOT / "tests" / file).read_text() for name, file in ELSEWHERE.items())
    assert known == {*cases, *ELSEWHERE, *PARAMS_WITHOUT_EFFECT}, "a parameter has no case"
    same = [name for name, (common, value) in cases.items()
            if result(llm, common) == result(llm, {**common, name: value})]
    assert not same


def test_what_is_said_to_have_no_effect_has_none(llm: LLM) -> None:
    common: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "skip_special_tokens": False}
    assert list(PARAMS_WITHOUT_EFFECT) == ["spaces_between_special_tokens"]
    assert result(llm, common) == result(llm, {**common, "spaces_between_special_tokens": False})
    beams: dict[str, Any] = {"n": 2, "use_beam_search": True, "max_tokens": 6}
    others: dict[str, Any] = {"temperature": 0.3, "top_p": 0.5, "top_k": 2, "min_p": 0.5, "seed": 3}
    assert set(others) == set(BEAM_SEARCH_IGNORES)
    assert result(llm, beams) == result(llm, {**beams, **others})
