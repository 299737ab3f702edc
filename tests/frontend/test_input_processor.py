"""What is refused, what is resolved, and what the engine gets."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.errors import ConfigError, ContextLengthError, RequestError
from jaxpaged.core.messages import Grammar
from jaxpaged.core.reasoning import REASONING_FORMATS
from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputsParams
from jaxpaged.frontend.answer_forms import MAX_GRAMMARS, MAX_GRAMMARS_BYTES
from jaxpaged.frontend.generation_defaults import default_sampling_params
from jaxpaged.frontend.input_processor import InputProcessor
from jaxpaged.frontend.output_processor import OutputProcessor
from jaxpaged.text.structured_outputs import GrammarCompiler
from jaxpaged.text.tokenizer import Tokenizer
from jaxpaged.text.tokenizer_files import load_tokenizer
from tests.support.tiny_tokenizers import TEMPLATE, byte_level_metadata, sentencepiece_metadata, wordpiece, wrap

TOKENIZER = wrap(sentencepiece_metadata())
VOCAB = 400
EOS = frozenset({2, 7})


def processor(tokenizer: Any = TOKENIZER, *, max_model_len: int = 20, **more: Any) -> InputProcessor:
    return InputProcessor(tokenizer, max_model_len=max_model_len, vocab_size=VOCAB, eos_token_ids=EOS,
                          **more)


def refused(prompt: object, params: SamplingParams | None = None, **more: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        processor(**more).process("r", prompt, params)
    return caught.value


# Prompts


def test_prompts_of_all_forms() -> None:
    ids = TOKENIZER.encode("hello world")
    for prompt, text in (("hello world", "hello world"), ({"prompt": "hello world"}, "hello world"), (ids, None),
                         (tuple(ids), None), ({"prompt_token_ids": ids}, None),
                         ({"prompt": "given", "prompt_token_ids": ids}, "given")):
        found = processor().process("r", prompt, SamplingParams(max_tokens=3))
        assert (found.prompt, found.prompt_token_ids) == (text, tuple(ids))
        assert found.sequences[0].prompt_token_ids == tuple(ids)


def test_ids_are_used_as_given_and_text_gets_a_bos_token() -> None:
    assert processor().process("r", [5, 6]).prompt_token_ids == (5, 6)
    assert processor().process("r", "hello").prompt_token_ids[0] == 1
    assert processor().process("r", "hello", add_special_tokens=False).prompt_token_ids[0] != 1


@pytest.mark.parametrize("prompt", [
    None, "", [], (), {}, {"prompt": ""}, {"prompt": None}, {"prompt_token_ids": []}, {"prompt": 5}, 5, True, 1.5,
    b"bytes", [True], [1, False], [1, 2.0], [1, "2"], ["a", "b"], [[1, 2]], [1, [2]], [None], [-1], [VOCAB], [2**70],
    {"prompt_token_ids": "12"}, {"prompt_token_ids": {"1": 2}}, {"prompt": "a", "multi_modal_data": {}}, {1: 2},
    "a\ud800"])
def test_bad_prompts(prompt: object) -> None:
    error = refused(prompt)
    assert error.param == "prompt" and len(str(error)) < 200


def test_ids_at_the_edges() -> None:
    assert processor().process("r", [0, VOCAB - 1]).prompt_token_ids == (0, VOCAB - 1)


def test_a_token_that_the_model_lacks() -> None:
    small = InputProcessor(TOKENIZER, max_model_len=20, vocab_size=259)
    with pytest.raises(RequestError, match="model does not know"):
        small.process("r", "hello")


def test_without_a_tokenizer() -> None:
    assert processor(None).process("r", [1, 2]).prompt is None
    assert refused("text", tokenizer=None).param == "prompt"
    with pytest.raises(RequestError, match="tokenizer"):
        processor(None).render_chat([{"role": "user", "content": "a"}])


# Lengths


def test_prompt_and_max_tokens_may_fill_the_context() -> None:
    found = processor().process("r", [5] * 12, SamplingParams(max_tokens=8))
    assert found.max_tokens == found.sequences[0].max_tokens == 8


def test_one_too_many() -> None:
    error = refused([5] * 13, SamplingParams(max_tokens=8))
    assert isinstance(error, ContextLengthError)
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    assert all(number in str(error) for number in ("20", "21", "13", "8"))


def test_max_tokens_left_open_takes_what_fits() -> None:
    assert processor().process("r", [5] * 12, SamplingParams(max_tokens=None)).max_tokens == 8
    assert processor().process("r", [5] * 19, SamplingParams(max_tokens=None)).max_tokens == 1


def test_only_a_default_is_lowered() -> None:
    params = SamplingParams(max_tokens=16)
    assert processor().process("r", [5] * 12, params, lower_max_tokens=True).max_tokens == 8
    assert processor().process("r", [5] * 2, params, lower_max_tokens=True).max_tokens == 16
    assert processor().process("r", [5] * 12).max_tokens == 8


@pytest.mark.parametrize("max_tokens", [None, 1, 16])
@pytest.mark.parametrize("length", [20, 21, 5000])
def test_a_prompt_that_leaves_no_room(length: int, max_tokens: int | None) -> None:
    error = refused([5] * length, SamplingParams(max_tokens=max_tokens))
    assert isinstance(error, ContextLengthError) and error.code == "context_length_exceeded"
    assert "prompt is too long" in str(error) and "maximum context length is" in str(error)  # clients look for either
    assert error.param == "prompt" and str(length) in str(error) and "20" in str(error)


class NeverEncodes:
    """A tokenizer for texts that must be refused before they are tokenized."""

    def __init__(self, max_token_chars: int | None) -> None:
        self.max_token_chars = max_token_chars

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError("this text must not be tokenized")

    encode_chat = encode


def test_a_huge_text_is_refused_before_it_is_tokenized() -> None:
    error = refused("a" * 101, tokenizer=NeverEncodes(5))
    assert isinstance(error, ContextLengthError) and error.code == "context_length_exceeded" and "101" in str(error)
    assert "prompt is too long" in str(error) and "maximum context length is" in str(error)
    with pytest.raises(ContextLengthError) as caught:
        processor(NeverEncodes(5)).render_chat([{"role": "user", "content": "a" * 60}] * 2)
    assert caught.value.param == "messages"
    with pytest.raises(AssertionError):
        processor(NeverEncodes(None)).process("r", "a" * 101)


@given(text=st.lists(st.sampled_from(["hello", " the", " world", "a", "日", "\n"]), max_size=25).map("".join))
def test_the_early_bound_refuses_nothing_that_fits(text: str) -> None:
    """Whatever is refused by its characters would also be refused by its tokens."""
    ids = TOKENIZER.encode(text)
    if text and len(ids) < 20:
        assert processor().process("r", text, SamplingParams(max_tokens=1)).prompt_token_ids == tuple(ids)


# Parameters


@pytest.mark.parametrize(("params", "stops", "eos"), [
    ({}, EOS, EOS),
    ({"stop_token_ids": [9, 2]}, EOS | {9}, EOS),
    ({"ignore_eos": True}, set(), set()),
    ({"ignore_eos": True, "stop_token_ids": [9, 2]}, {9, 2}, set()),
])
def test_ids_that_end_the_text(params: dict[str, Any], stops: set[int], eos: set[int]) -> None:
    (sequence,) = processor().process("r", [5], SamplingParams(**params)).sequences
    assert sequence.stop_token_ids == frozenset(stops) and sequence.eos_token_ids == frozenset(eos)


@pytest.mark.parametrize(("seed", "resolved"), [(None, None), (0, 0), (5, 5), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_seeds(seed: int | None, resolved: int | None) -> None:
    assert processor().process("r", [5], SamplingParams(seed=seed)).sequences[0].seed == resolved


def test_choices_become_sequences_that_the_output_processor_knows() -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=5)
    found = processor(takes_priorities=True).process("r", [5, 6], params, arrival_time=1.5, priority=2)
    assert [sequence.choice for sequence in found.sequences] == [0, 1, 2]
    assert {(sequence.seed, sequence.arrival_time, sequence.priority, sequence.params, sequence.max_tokens)
            for sequence in found.sequences} == {(4, 1.5, 2, params, 5)}
    ids = OutputProcessor(None).add_request("r", None, found.prompt_token_ids, params, found.arrival_time)
    assert [sequence.request_id for sequence in found.sequences] == ids


@pytest.mark.parametrize("priority", [2**31, -(2**31), 1.0, True, "1"])
def test_priorities_are_checked(priority: Any) -> None:
    with pytest.raises(RequestError) as caught:
        processor(takes_priorities=True).process("r", [5], priority=priority)
    assert caught.value.param == "priority"


@pytest.mark.parametrize("salt", ["", 5, ["a"], True, "x" * 1025])
def test_salts_are_checked(salt: Any) -> None:
    for prompt, more in (([5], {"cache_salt": salt}), ({"prompt_token_ids": [5], "cache_salt": salt}, {})):
        with pytest.raises(RequestError) as caught:
            processor().process("r", prompt, **more)
        assert caught.value.param == "cache_salt"


@pytest.mark.parametrize("priority", [1, -1])
def test_priorities_are_refused_where_the_policy_ignores_them(priority: int) -> None:
    with pytest.raises(RequestError, match="--scheduling-policy priority") as caught:
        processor().process("r", [5], priority=priority)
    assert caught.value.param == "priority"
    assert processor().process("r", [5], priority=0).sequences[0].priority == 0


def test_the_models_defaults_are_for_requests_without_parameters() -> None:
    made = processor(default_params={"temperature": 0.6, "max_tokens": 4})
    assert made.process("r", [5]).params.temperature == 0.6
    assert made.process("r", [5]).max_tokens == 4
    assert made.process("r", [5], SamplingParams()).params.temperature == 1


def test_defaults_of_a_generation_config() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "max_new_tokens": 16,
              "eos_token_id": [1, 2], "pad_token_id": 0, "repetition_penalty": 1.0, "num_beams": 1, "typical_p": None}
    assert default_sampling_params(config) == {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1,
                                               "max_tokens": 16}
    assert default_sampling_params({}) == {}
    assert default_sampling_params({"repetition_penalty": 1.05}) == {"repetition_penalty": 1.05}
    with pytest.raises(ConfigError, match="temperature"):
        default_sampling_params({"temperature": -1})
    with pytest.raises(ConfigError, match="--generation-config"):
        default_sampling_params({"top_k": "many"})


# Chats


def test_a_repeated_grammar_is_compiled_once() -> None:
    """Up to a number of grammars and to the bytes of their texts."""
    made: list[StructuredOutputsParams] = []

    def compile_grammar(wanted: StructuredOutputsParams) -> Grammar:
        made.append(wanted)
        return Grammar("x" * (2**23 if wanted.json_object else 10), 1)

    inputs = processor(make_grammar=compile_grammar)
    for _ in range(3):
        for schema in ({"type": "string"}, {"type": "integer"}):
            params = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(json=schema))
            assert inputs.process("r", [5], params).sequences[0].grammar == Grammar("x" * 10, 1)
    assert [wanted.json for wanted in made] == [{"type": "string"}, {"type": "integer"}]
    for number in range(MAX_GRAMMARS):
        inputs.grammar(StructuredOutputsParams(regex=f"a{number}"))
    inputs.grammar(StructuredOutputsParams(json={"type": "string"}))
    assert len(made) == 2 + MAX_GRAMMARS + 1 and len(inputs._forms._grammars) == MAX_GRAMMARS
    inputs.grammar(StructuredOutputsParams(json_object=True))
    assert len(inputs._forms._grammars) == MAX_GRAMMARS and inputs._forms._grammars.num_bytes <= MAX_GRAMMARS_BYTES


def test_a_schema_that_cannot_be_a_key_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested too deeply"):
        processor().grammar(StructuredOutputsParams(json=deep))


def test_a_chat_becomes_a_prompt() -> None:
    made = processor(max_model_len=100)
    prompt = made.render_chat([{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    assert prompt.text == "<s>[user]hello</s>[assistant]"
    found = made.process("r", prompt, SamplingParams(max_tokens=None))
    assert (found.prompt, list(found.prompt_token_ids)) == (prompt.text, prompt.token_ids)
    assert found.prompt_token_ids.count(1) == 1
    with pytest.raises(ContextLengthError) as caught:
        processor(max_model_len=5).render_chat([{"role": "user", "content": "hello"}])
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_a_tokenizer_without_bound_and_one_with_composition() -> None:
    assert processor(wordpiece()).process("r", "the dog").prompt == "the dog"
    assert len(processor(wrap(byte_level_metadata("qwen2"))).process("r", "e\u0301" * 5).prompt_token_ids) == 10


def test_the_real_model(smollm2_path: Path) -> None:
    made = InputProcessor(load_tokenizer(smollm2_path), max_model_len=8192, vocab_size=49152, eos_token_ids={2})
    assert made.process("r", "The capital of France is").prompt_token_ids == (504, 3575, 282, 4649, 314)
    with pytest.raises(ContextLengthError, match="characters"):
        made.process("r", "a" * 10_000_000)
    with pytest.raises(ContextLengthError, match="tokens"):
        made.process("r", "word " * 9000)


# Reasoning before structured output

FORM = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), max_tokens=4)


def grammar_of(tokenizer: Tokenizer, name: str, prompt: object = None, **more: Any) -> tuple[str, str | None]:
    """The grammar of the answer to a chat, or to a text, and where the answer begins."""
    made = InputProcessor(tokenizer, max_model_len=100, vocab_size=tokenizer.vocab_size,
                          reasoning=REASONING_FORMATS[name])
    chat = made.render_chat([{"role": "user", "content": "a"}], **more) if prompt is None else prompt
    found = made.process("r", chat, FORM)
    grammar = found.sequences[0].grammar
    assert grammar is not None
    return grammar.text, None if found.reasoning is None else found.reasoning.phase


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_a_model_that_knows_no_marks_answers_in_the_form_at_once(name: str) -> None:
    plain = wrap(byte_level_metadata("qwen2", **{"tokenizer.chat_template": TEMPLATE}))
    form = GrammarCompiler().grammar(StructuredOutputsParams(choice=["yes", "no"])).text
    assert grammar_of(plain, name) == (form, "before")
    # Unless its template or its tokens say otherwise.
    begin, always = REASONING_FORMATS[name].begin, REASONING_FORMATS[name].always
    for tokenizer in (wrap(byte_level_metadata("qwen2", **{
            "tokenizer.chat_template": TEMPLATE + f"{{% if deep %}}{begin}{{% endif %}}"})),
            TOKENIZER if begin == "<think>" else None):
        if tokenizer is not None:
            text, phase = grammar_of(tokenizer, name)
            assert "thoughts" in text and phase == ("inside" if always else "before")
    opened = wrap(byte_level_metadata("qwen2", **{"tokenizer.chat_template": TEMPLATE + begin}))
    assert grammar_of(opened, name)[1] == "inside"
    assert grammar_of(plain, name, f"So: {begin}")[0] != form and grammar_of(plain, name, "So:") == (form, None)
