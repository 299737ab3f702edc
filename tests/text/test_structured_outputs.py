"""Texts that must look like something: what is refused, and that every text which ends by itself fits."""

import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.errors import RequestError
from jaxpaged.core.limits import Limits
from jaxpaged.core.messages import Grammar
from jaxpaged.core.outputs import RequestOutput
from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputsParams
from jaxpaged.engine.llm import LLM
from jaxpaged.engine.structured_output_manager import MAX_COMPILED, StructuredOutputManager
from jaxpaged.text.structured_outputs import GrammarCompiler
from tests.support.random_walk import accepts, random_model
from tests.support.tiny_llama import CONFIG, EOS, Reference, random_prompt, random_weights
from tests.support.tiny_tokenizers import byte_level_metadata, wrap

REFERENCE = Reference(CONFIG, random_weights())


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubling(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"anyOf": [{"type": "object", "properties": {"a": schema, "b": schema}}, {"items": schema}]}
    return schema


CIRCLE: dict[str, Any] = {}
CIRCLE["items"] = CIRCLE
BAD: dict[str, dict[str, Any]] = {
    "regex": {"regex": "(("}, "back reference": {"regex": r"(a)\1"}, "long regex": {"regex": "a" * 20_000},
    "schema that is no JSON": {"json": "{"}, "schema that is a list": {"json": "[1]"},
    "unknown type": {"json": {"type": "wizard"}}, "dangling reference": {"json": {"$ref": "#/$defs/nothing"}},
    "reference to itself": {"json": {"$ref": "#"}},
    "unsupported keyword": {"json": {"type": "array", "contains": {"type": "integer"}}},
    "deep schema": {"json": nested(100)}, "large schema": {"json": doubling(12)},
    "impossible": {"json": {"type": "integer", "minimum": 5, "maximum": 4}},
    "grammar": {"grammar": "start: what"}, "no grammar": {"grammar": "hello"}, "large grammar": {
        "grammar": "start: " + '"a" ' * 20_000}, "many choices": {"choice": ["x"] * 2000},
    "large choices": {"choice": ["x" * 70_000]}, "external reference": {"json": {"$ref": "http://localhost/schema"}},
    "file": {"json": {"$ref": "file:///etc/passwd"}},
    "not a number": {"json": {"minimum": float("nan")}}, "infinite": {"json": '{"minimum": 1e999}'},
    "half a character": {"regex": "\ud800"}, "half of a constant": {"json": {"const": "\ud800"}},
        "half a character to choose": {"choice": ["\ud800"]},
    "no JSON value": {"json": {"const": {1, 2}}}, "its own part": {"json": CIRCLE},
}
GOOD: dict[str, dict[str, Any]] = {
    "repeated": {"regex": "(a{1,1000}){1,1000}"}, "overlapping": {"regex": "(.*a.{40})|(.*b.{60})"},
    "recursive": {"json": {"$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}},
                           "$ref": "#/$defs/tree"}},
    "doubling": {"json": doubling(6)},
    "many properties": {"json": {"properties": {f"p{number}": {"type": "string"} for number in range(500)}}},
    "choices with everything": {"choice": ['a"b', "c\\d", "e\nf", "ü", "日本", "{}"]},
    "gbnf": {"grammar": 'root ::= "yes" | "no"'}, "lark": {"grammar": 'start: "yes" | "no"'},
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_compile_is_refused_quickly(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError) as caught:
        GrammarCompiler().grammar(StructuredOutputsParams(**BAD[name]))
    assert caught.value.param == "structured_outputs" and len(caught.value.message) < 200
    assert time.monotonic() - began < 20  # on a shared machine; alone it is a second


@pytest.mark.parametrize("name", GOOD)
def test_what_compiles(name: str) -> None:
    GrammarCompiler().grammar(StructuredOutputsParams(**GOOD[name]))


@pytest.mark.parametrize("fields", [
    {}, {"regex": "a", "json_object": True}, {"json_object": False}, {"json": [1]}, {"json": 3}, {"regex": ""},
    {"regex": 3}, {"grammar": {}}, {"choice": []}, {"choice": "ab"}, {"choice": [""]}, {"choice": [1]},
    {"json_object": "yes"},
], ids=str)
def test_none_or_several_of_the_parameters(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == "structured_outputs"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


# Masks


TOKENIZER = wrap(byte_level_metadata("gpt-2"))


def checked(**fields: Any) -> Grammar:
    return GrammarCompiler().grammar(StructuredOutputsParams(**fields))


def make_manager(max_bytes: int = 2**24) -> StructuredOutputManager:
    return StructuredOutputManager(lambda: TOKENIZER, eos_token_ids=(), vocab_size=TOKENIZER.vocab_size,
                                   num_logits=TOKENIZER.vocab_size + 40, max_bytes=max_bytes)


def allowed(matcher: Any) -> set[int]:
    mask = matcher.mask()
    return {token for token in range(32 * len(mask)) if mask[token >> 5] >> (token & 31) & 1}


@settings(max_examples=25)
@given(st.lists(st.text("abc\"\\ é你{", min_size=1, max_size=6), min_size=1, max_size=4, unique=True))
def test_only_tokens_that_lead_to_a_choice_are_allowed(choices: list[str]) -> None:
    """Checked against the bytes of every token, on the way to each choice; its usual spelling is always possible."""
    manager = make_manager()
    [end] = TOKENIZER.eos_token_ids
    grammar = checked(choice=choices)
    for choice in choices:
        matcher, done = manager.create_matcher(grammar), b""
        for token in [*TOKENIZER.encode(choice), None]:
            wanted = {other for other in range(TOKENIZER.vocab_size) if not TOKENIZER.is_special(other) and any(
                text.encode().startswith(done + TOKENIZER.token_bytes(other)) for text in choices)}
            found = allowed(matcher)
            assert found - {end} <= wanted and (end in found) == (done.decode(errors="replace") in choices)
            if token is None:
                break
            assert token in found
            if matcher.advance(token):
                assert done + TOKENIZER.token_bytes(token) == choice.encode()
                break
            done += TOKENIZER.token_bytes(token)
    manager.close()


@pytest.mark.parametrize("size", [TOKENIZER.vocab_size, 288, 320, 321])
def test_vocabularies_of_every_size(size: int) -> None:
    manager = StructuredOutputManager(lambda: TOKENIZER, eos_token_ids=(), vocab_size=size, num_logits=size,
                                      max_bytes=2**20)
    matcher = manager.create_matcher(checked(regex="h+"))
    assert TOKENIZER.encode("h")[0] in allowed(matcher) and max(allowed(matcher)) < TOKENIZER.vocab_size
    manager.close()


@pytest.mark.parametrize("wanted", [
    {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}}}, {"choice": ["h", "hello"]},
    {"grammar": 'start: "(" start ")" | "x"'}, {"regex": "a+b?"}, {"json": {"type": "integer"}}, {"json_object": True},
], ids=str)
def test_a_form_ends_without_an_end_token(wanted: dict[str, Any]) -> None:
    """Some models and files name none; then a text ends where nothing may follow, or the caller's limit cuts it."""
    tokenizer = wrap(byte_level_metadata("gpt-2"))
    tokenizer.eos_token_ids = frozenset()
    grammar = checked(**wanted)
    with random_model(tokenizer) as model:
        for seed in range(4):
            assert accepts(grammar, model.write(grammar, seed))


def test_compiled_grammars_are_cached_up_to_a_bound() -> None:
    manager = make_manager()
    for number in range(MAX_COMPILED + 20):
        for _ in range(2):
            assert allowed(manager.create_matcher(checked(regex=f"{number:03d}")))
    assert len(manager._compiled) == MAX_COMPILED
    manager.close()


def test_compiled_grammars_are_cached_up_to_their_bytes() -> None:
    """A schema of 200 bytes may take megabytes: what counts is what the C library has given out for it."""
    large = [checked(json={"type": "integer", "multipleOf": 20_011 + number}) for number in range(3)]
    assert all(5 * 2**20 < grammar.num_bytes < 20 * 2**20 for grammar in large)
    assert checked(regex="ab").num_bytes < 2**18
    manager = make_manager(max_bytes=25 * 2**20)
    for grammar in large:
        assert allowed(manager.create_matcher(grammar))
    assert len(manager._compiled) == 2 and manager._compiled.num_bytes == sum(
        grammar.num_bytes for grammar in large[1:])
    manager.close()


@pytest.mark.parametrize(("limit", "wanted"), [
    ({"max_schema_chars": 20}, {"json": SCHEMA}), ({"max_schema_depth": 2}, {"json": SCHEMA}),
    ({"max_schema_levels": 4}, {"json": {"$ref": "#/$defs/a", "$defs": {
        "a": {"items": {"$ref": "#/$defs/b"}}, "b": {"items": {"type": "null"}}}}}),
    ({"max_regex_chars": 3}, {"regex": "abcd"}), ({"max_grammar_chars": 10}, {"grammar": 'start: "yes"'}),
    ({"max_choices": 1}, {"choice": ["a", "b"]}), ({"max_choices_chars": 3}, {"choice": ["ab", "cd"]}),
    ({"max_multiple_of": 12}, {"json": {"type": "number", "multipleOf": 0.13}}),
    ({"max_grammar_bytes": 2**20}, {"json": {"type": "integer", "multipleOf": 20_011}}),
], ids=str)
def test_limits_on_what_is_compiled(limit: dict[str, int], wanted: dict[str, Any]) -> None:
    [number] = limit.values()
    checker = GrammarCompiler(Limits(**limit))
    with pytest.raises(ValueError, match=rf"at most {number} "):
        checker.grammar(StructuredOutputsParams(**wanted))
    GrammarCompiler().grammar(StructuredOutputsParams(**wanted))


def test_masks_are_computed_by_other_threads() -> None:
    seen: list[threading.Thread] = []

    def load() -> Any:
        seen.append(threading.current_thread())
        return TOKENIZER

    manager = StructuredOutputManager(load, eos_token_ids=(), vocab_size=TOKENIZER.vocab_size,
                                      num_logits=TOKENIZER.vocab_size, max_bytes=2**20)
    matcher = manager.create_matcher(checked(regex="ab+"))
    while not matcher.ready:
        manager.wait_for_mask(1)
    assert seen and threading.current_thread() not in seen
    manager.close()


# Through the engine


PERSON = {"type": "object", "additionalProperties": False, "required": ["age", "tags"], "properties": {
    "age": {"type": "integer", "minimum": 0, "maximum": 99}, "tags": {
        "type": "array", "minItems": 2, "maxItems": 2, "items": {"enum": ["red", "green", "blue"]}}}}


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (set(found) == {"age", "tags"} and 0 <= found["age"] <= 99 and len(found["tags"]) == 2
            and set(found["tags"]) <= {"red", "green", "blue"})


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": PERSON}, is_person),
    "json text": ({"json": json.dumps(PERSON)}, is_person),
    "regex": ({"regex": "[a-f]{8,30}-[0-9]+x"}, lambda text: re.fullmatch("[a-f]{8,30}-[0-9]+x", text)),
    "choice": ({"choice": ["yes", "no", "perhaps not today"]}, lambda text: text in ("yes", "no", "perhaps not today")),
    "grammar": ({"grammar": 'start: "(" start ")" | "x"'}, lambda text: re.fullmatch(r"\(*x\)*", text)
                and text.count("(") == text.count(")")),
}
FREE = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def generate(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(list(prompts), list(params), use_tqdm=False)


def test_every_text_fits_and_unconstrained_neighbors_stay_so(llm: LLM, few_blocks: LLM) -> None:
    """Greedy and sampled, with blocks taken away on the way, mixed with requests without a constraint."""
    prompts = [[token % 60 for token in random_prompt(5 + 4 * number, number)]  # whole characters
               for number in range(2 * len(KINDS) + 2)]
    params = [SamplingParams(temperature=number % 2, seed=number, max_tokens=60,
                             structured_outputs=StructuredOutputsParams(**fields))
              for number in range(2) for fields, _ in KINDS.values()] + [FREE] * 2
    checks = [check for _ in range(2) for _, check in KINDS.values()]
    before = few_blocks.get_metrics()["vllm:num_preemptions"]
    for engine in (llm, few_blocks):
        compilations = engine.get_metrics()["jaxpaged:compilations"]
        outputs = generate(engine, prompts, params)
        for output, check in zip(outputs, checks, strict=False):
            [choice] = output.outputs
            assert choice.finish_reason in ("stop", "length") and choice.stop_reason is None
            assert choice.finish_reason == "length" or check(choice.text), choice
        assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) >= 4  # a random model dallies
        for prompt, output in zip(prompts[-2:], outputs[-2:], strict=True):
            assert REFERENCE.error(prompt, output.outputs[0].token_ids, 60) is None
        assert engine.get_metrics()["jaxpaged:compilations"] == compilations
    assert few_blocks.get_metrics()["vllm:num_preemptions"] > before


def test_a_json_object_ends_when_it_closes(llm: LLM) -> None:
    """The end token is not needed, and would not be shown."""
    # brackets, quotes and a letter alone: a model of random weights closes what it opens sooner or later
    char_ids = [llm.get_tokenizer().encode(char)[0] for char in '{}":a1, ']
    params = [SamplingParams(seed=seed, max_tokens=100, allowed_token_ids=char_ids, ignore_eos=True,
                             structured_outputs=StructuredOutputsParams(json_object=True)) for seed in range(8)]
    ended = 0
    for output in generate(llm, [[1, 2]] * 8, params):
        [choice] = output.outputs
        assert EOS not in choice.token_ids and not re.search(r"\s{21}", choice.text.split('"')[0])
        if choice.finish_reason == "stop":
            ended += 1
            assert isinstance(json.loads(choice.text), dict) and choice.text.endswith("}")
    assert ended > 2


def test_max_tokens_cuts_the_text(llm: LLM) -> None:
    [output] = generate(llm, [[1, 2]], [SamplingParams(
        temperature=0, max_tokens=3, structured_outputs=StructuredOutputsParams(json=PERSON))])
    assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 3


def test_with_other_parameters(llm: LLM) -> None:
    """Several choices, log probabilities, a least length that the constraint cannot give, and penalties."""
    constraint = StructuredOutputsParams(regex="[ab]{6}")
    several, short, penalized = generate(llm, [[1, 2]] * 3, [
        SamplingParams(n=3, seed=1, max_tokens=20, logprobs=1, structured_outputs=constraint),
        SamplingParams(temperature=0, max_tokens=20, min_tokens=10, structured_outputs=constraint),
        SamplingParams(temperature=0, max_tokens=20, frequency_penalty=2, structured_outputs=constraint)])
    for choice in (*several.outputs, *short.outputs, *penalized.outputs):
        assert re.fullmatch("[ab]{6}", choice.text) and choice.finish_reason == "stop"
    assert len({choice.text for choice in several.outputs}) > 1
    assert all(choice.logprobs is not None and len(choice.logprobs) == 6 for choice in several.outputs)
    assert set(penalized.outputs[0].text) == {"a", "b"}


def test_parameters_that_leave_no_token_are_an_error(llm: LLM) -> None:
    """Unless the text is complete, which it may be before the end token that they exclude."""
    letters = [llm.get_tokenizer().encode(char)[0] for char in "ab"]
    [six] = llm.get_tokenizer().encode("6")
    wanted = {"[0-9]{3}": "error", "a{3}": "stop", "a{2}[0-9]": "error", "(ab)+": "length"}
    params = [SamplingParams(max_tokens=8, temperature=0, allowed_token_ids=letters,
                             structured_outputs=StructuredOutputsParams(regex=regex)) for regex in wanted]
    banned = SamplingParams(max_tokens=8, temperature=0, bad_words=["6"],
                            structured_outputs=StructuredOutputsParams(regex="x?6"))
    outputs = generate(llm, [[1, 2]] * 6, [*params, banned, FREE])
    assert [output.outputs[0].finish_reason for output in outputs] == [*wanted.values(), "error", "length"]
    assert [output.outputs[0].text for output in outputs[1:4]] == ["aaa", "aa", "abababab"]
    assert six not in outputs[4].outputs[0].token_ids


def test_choices_share_their_prompt(llm: LLM, few_blocks: LLM) -> None:
    """Even where it does not fill a block, and nothing else could be shared; their texts stay what each draws alone."""
    params = SamplingParams(n=3, seed=1, max_tokens=5, structured_outputs=StructuredOutputsParams(regex="[a-f]+"))
    before = llm.get_metrics()["jaxpaged:kv_blocks_shared_sum"]
    [forked], [other] = (generate(engine, [random_prompt(10, 1)], [params]) for engine in (llm, few_blocks))
    assert llm.get_metrics()["jaxpaged:kv_blocks_shared_sum"] > before
    texts = [choice.text for choice in forked.outputs]
    assert len(set(texts)) > 1 and texts == [choice.text for choice in other.outputs]
    alone = generate(llm, [random_prompt(10, 1)] * 2, [replace(params, n=1), replace(params, n=2)])
    assert [[choice.text for choice in output.outputs] for output in alone] == [texts[:1], texts[:2]]


def test_a_grammar_that_only_the_engine_cannot_compile_ends_its_request_with_an_error(
        llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fine = StructuredOutputsParams(choice=["fine"])
    with monkeypatch.context() as patch:
        patch.setattr(llm._front.inputs._forms, "grammar", lambda wanted: Grammar("junk", 1))
        [bad, free] = generate(llm, [[1, 2], [3]], [
            SamplingParams(max_tokens=20, structured_outputs=fine), SamplingParams(max_tokens=4, ignore_eos=True)])
    assert bad.outputs[0].finish_reason == "error" and not bad.outputs[0].token_ids
    assert "structured_outputs" in caplog.text
    assert len(free.outputs[0].token_ids) == 4


def test_a_refused_regex_leaves_the_engine_usable(llm: LLM) -> None:
    with pytest.raises(RequestError):
        generate(llm, [[1]], [SamplingParams(structured_outputs=StructuredOutputsParams(regex="(("))])
    [output] = generate(llm, [[1, 2]], [SamplingParams(
        temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["fine"]))])
    assert output.outputs[0].text == "fine"
