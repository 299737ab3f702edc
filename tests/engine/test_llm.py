"""The Python API as users type it: LLM and generate on a tiny model."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpaged
from jaxpaged import LLM, RequestOutput, SamplingParams
from jaxpaged.core.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    NotSupportedError,
    RequestError,
)
from jaxpaged.execution.model_runner import ModelRunner, StepInFlight
from jaxpaged.scheduling.scheduler_output import SchedulerOutput
from tests.support.tiny_llama import CONFIG, CONTEXT, ENGINE_ARGS, EOS, module_and_params, random_prompt, write_model
from tests.support.tiny_llm import GAUGES, GREEDY, check_greedy, large_arrays


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    """Whatever a call does, it leaves nothing running."""
    yield
    if llm._engine is not None:
        metrics = llm.get_metrics()
        assert not any(metrics[name] for name in GAUGES)


def ids_of(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


# Prompts


def test_one_text(llm: LLM) -> None:
    [output] = llm.generate("hello", GREEDY, use_tqdm=False)
    check_greedy([output])
    assert output.prompt == "hello"
    assert output.prompt_token_ids == tuple(llm.get_tokenizer().encode("hello"))
    assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids)
    assert output.num_cached_tokens == 0 and output.prompt_logprobs is None


def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello there")
    forms: list[Any] = ["hello there", ids, tuple(ids), {"prompt": "hello there"}, {"prompt_token_ids": ids},
                        ["hello there"], [ids], [{"prompt": "hello there"}], ({"prompt_token_ids": tuple(ids)},)]
    results = [ids_of(llm.generate(form, GREEDY, use_tqdm=False)) for form in forms]
    assert all(len(result) == 1 and result == results[0] for result in results)
    mixed = ids_of(llm.generate([*forms[:5], "other"], GREEDY, use_tqdm=False))
    assert mixed[:5] == [results[0][0]] * 5


def test_numbers_and_arrays_of_numpy_and_jax_are_accepted(llm: LLM) -> None:
    rows: Any = np.array([[1, 2, 3], [4, 5, 6]])
    wanted = ids_of(llm.generate(rows.tolist(), GREEDY, use_tqdm=False))
    numbers: dict[str, Any] = {"temperature": np.float32(0), "max_tokens": np.int64(8)}
    params = SamplingParams(**numbers, ignore_eos=True)
    batches: list[Any] = [rows, jnp.asarray(rows), list(rows), [list(row) for row in rows],
                          [{"prompt_token_ids": row} for row in rows]]
    for batch in batches:
        assert ids_of(llm.generate(batch, params, use_tqdm=False)) == wanted
    assert ids_of(llm.generate(rows[0], params, use_tqdm=False)) == wanted[:1]
    with pytest.raises(RequestError, match="integers"):
        llm.generate(rows * 0.5, params, use_tqdm=False)


def test_results_keep_the_order_of_the_prompts(llm: LLM) -> None:
    """However they end: lengths differ, and there are more than run at once."""
    prompts = [random_prompt(1 + 7 * number % 40, number) for number in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=1 + 5 * number % 17, ignore_eos=True) for number in range(12)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in prompts]
    for output, param in zip(outputs, params, strict=True):
        check_greedy([output], param.max_tokens or 0)
    assert len({output.request_id for output in outputs}) == 12


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize("prompt", [
    "", {"prompt": ""}, {"prompt_token_ids": []}, [[]], ["ok", ""], {"prompt_token_ids": [-1]},
    {"prompt_token_ids": [CONFIG["vocab_size"]]}, [[1, True]], [[1.5]], [None], {"text": "x"}, ["ok", 5], None, 5,
], ids=repr)
def test_bad_prompts_are_refused_before_anything_runs(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert caught.value.param == "prompt"


def test_the_context_is_a_limit(llm: LLM) -> None:
    full = llm.generate([[1] * (CONTEXT - 8)], GREEDY, use_tqdm=False)
    check_greedy(full)
    with pytest.raises(ContextLengthError, match="129 were asked for"):
        llm.generate([[1], [1] * (CONTEXT - 7)], GREEDY, use_tqdm=False)
    with pytest.raises(ContextLengthError, match="has 128 tokens"):
        llm.generate([[1] * CONTEXT], use_tqdm=False)
    whole = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [output] = llm.generate([[1] * 100], whole, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == CONTEXT - 100


# Parameters


def test_parameters_for_all_for_each_or_none(llm: LLM) -> None:
    outputs = llm.generate([[1, 2], [3]], [GREEDY, SamplingParams(max_tokens=3, ignore_eos=True)], use_tqdm=False)
    assert [len(ids) for ids in ids_of(outputs)] == [8, 3]
    [output] = llm.generate([[1, 2]], use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY], use_tqdm=False)
    for wrong in ({"max_tokens": 3}, [{"max_tokens": 3}], 5):
        with pytest.raises(RequestError, match="must be a SamplingParams"):
            llm.generate([[1]], wrong, use_tqdm=False)  # type: ignore[arg-type]


def test_several_choices(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=10, ignore_eos=True)
    first, second = llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
    for output in (first, second):
        assert [choice.index for choice in output.outputs] == [0, 1, 2]
        assert len({choice.token_ids for choice in output.outputs}) == 3
        assert {choice.finish_reason for choice in output.outputs} == {"length"}
    [again] = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert again.outputs == first.outputs
    [one] = llm.generate([[1, 2, 3]], SamplingParams(seed=4, max_tokens=10, ignore_eos=True), use_tqdm=False)
    assert one.outputs[0] == first.outputs[0], "the first choice is what a request for one gives"
    [greedy] = llm.generate([[5]], SamplingParams(n=2, temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert greedy.outputs[0].token_ids == greedy.outputs[1].token_ids


@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings(llm: LLM, keep: bool) -> None:
    """The text ends before (or after) the string, the tokens with the one that completed it."""
    [free] = llm.generate("abc", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    ids, text = free.outputs[0].token_ids, free.outputs[0].text
    index = next(index for index in range(5, len(text) - 1)
                 if text[index : index + 2].isascii() and text[index : index + 2].isprintable())
    stop = text[index : index + 2]
    first = text.index(stop)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop, "never there"],
                            include_stop_str_in_output=keep)
    [output] = llm.generate("abc", params, use_tqdm=False)
    [choice] = output.outputs
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.text == text[: first + (2 if keep else 0)]
    assert choice.token_ids == ids[: len(choice.token_ids)]
    assert llm.get_tokenizer().decode(choice.token_ids) == text[: first + 2]


def test_stop_ids_and_end_ids(llm: LLM) -> None:
    [free] = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    stop = free.outputs[0].token_ids[3]
    index = free.outputs[0].token_ids.index(stop)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    [output] = llm.generate([[1, 2]], params, use_tqdm=False)
    [choice] = output.outputs
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (
        free.outputs[0].token_ids[: index + 1], "stop", stop)


def test_the_models_end_id_ends_a_text_unless_ignored(tmp_path: Path, model_path: Path) -> None:
    """The id is named in config.json alone."""
    with LLM(model=str(model_path), **ENGINE_ARGS) as llm:
        [free] = llm.generate([[7, 7]], GREEDY, use_tqdm=False)
    end = free.outputs[0].token_ids[2]
    folder = write_model(tmp_path / "model", CONFIG | {"eos_token_id": [EOS, end]})
    with LLM(model=str(folder), **ENGINE_ARGS) as llm:
        [ended] = llm.generate([[7, 7]], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        [whole] = llm.generate([[7, 7]], GREEDY, use_tqdm=False)
    index = free.outputs[0].token_ids.index(end)
    [choice] = ended.outputs
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (
        free.outputs[0].token_ids[: index + 1], "stop", None)
    assert whole.outputs == free.outputs


def test_embeddings_need_their_program(llm: LLM) -> None:
    with pytest.raises(NotSupportedError, match="enable_embeddings=True"):
        llm.embed(["x"])


def test_a_prompt_that_is_refused_late_leaves_nothing_behind(tmp_path: Path) -> None:
    """Without a tokenizer stop strings cannot work; the other prompts of the call must not keep running."""
    with LLM(model=module_and_params(), **ENGINE_ARGS) as llm:
        with pytest.raises(RequestError, match="stop strings need a tokenizer"):
            llm.generate([[1, 2], [3]], [GREEDY, SamplingParams(stop="x")], use_tqdm=False)
        metrics = llm.get_metrics()
        assert metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"] == 0
        assert len(llm.generate([[1, 2]], GREEDY, use_tqdm=False)) == 1


def test_the_progress_bar_counts_prompts(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1], [2]], GREEDY)
    assert "2/2" in capfd.readouterr().err
    llm.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")


# Chats


def test_chat_is_the_template_and_generate(llm: LLM) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    [output] = llm.chat(messages, GREEDY, use_tqdm=False)
    text = "[system]be brief<|end|>[user]hi<|end|>[assistant]"
    assert output.prompt == text
    assert output.prompt_token_ids == tuple(llm.get_tokenizer().encode(text))
    check_greedy([output])
    several = llm.chat([messages, messages[1:]], GREEDY, use_tqdm=False)
    assert several[0].outputs == output.outputs and several[1].prompt == "[user]hi<|end|>[assistant]"


def test_chat_options_reach_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    [output] = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == "[user]hi<|end|>[assistant]I am"


@pytest.mark.parametrize("messages", [
    [{"role": "alien", "content": "x"}], [{"role": "tool", "content": "x"}], [{"content": "x"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "image_url"}]}], [], [[]],
], ids=str)
def test_bad_messages_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert caught.value.param == "messages"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items()
                                if key != "chat_template"}))
    with LLM(model=str(folder), **ENGINE_ARGS) as llm:
        with pytest.raises(RequestError, match="chat template"):
            llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
        check_greedy(llm.generate("hi", GREEDY, use_tqdm=False))


# generate(), models in memory


def test_generate_loads_a_model_for_one_call(model_path: Path) -> None:
    outputs = jaxpaged.generate(str(model_path), ["one", "two"], temperature=0, max_tokens=5, ignore_eos=True,
                                engine_args=ENGINE_ARGS, use_tqdm=False)
    check_greedy(outputs, 5)
    assert [output.prompt for output in outputs] == ["one", "two"]


def test_generate_uses_an_llm_and_leaves_it_open(llm: LLM) -> None:
    [with_keywords] = jaxpaged.generate(llm, "one", temperature=0, max_tokens=8, ignore_eos=True, use_tqdm=False)
    [with_params] = jaxpaged.generate(llm, "one", GREEDY, use_tqdm=False)
    assert with_keywords.outputs == with_params.outputs
    check_greedy([with_params])


def test_generate_names_a_keyword_that_does_not_exist(llm: LLM) -> None:
    with pytest.raises(RequestError, match="did you mean temperature") as caught:
        jaxpaged.generate(llm, "one", temprature=0)
    assert caught.value.param == "temprature"
    with pytest.raises(RequestError, match="max_tokens"):
        jaxpaged.generate(llm, "one", max_tokens=0)
    with pytest.raises(RequestError, match="not both"):
        jaxpaged.generate(llm, "one", GREEDY, temperature=0)
    with pytest.raises(RequestError, match=r"engine_args=\{'max_model_len': ...\}"):
        jaxpaged.generate("no-such-model", "one", max_model_len=64)  # said before the model is looked for


def test_keywords_are_sampling_parameters(llm: LLM) -> None:
    with_params = llm.generate(["one", "two"], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert ids_of(llm.generate(["one", "two"], temperature=0, max_tokens=3, use_tqdm=False)) == ids_of(with_params)
    conversation = [{"role": "user", "content": "hello"}]
    assert ids_of(llm.chat(conversation, temperature=0, max_tokens=3, use_tqdm=False)) == ids_of(
        llm.chat(conversation, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False))
    with pytest.raises(jaxpaged.errors.RequestError, match="temperature"):
        llm.generate("one", temperatur=0)


def test_an_error_says_which_of_the_prompts_it_is_about(llm: LLM) -> None:
    prompts: list[Any] = [[1, 2]] * 500
    prompts.insert(17, [1, 2, 10**6])
    with pytest.raises(RequestError, match=r"^prompts\[17\]: "):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match=r"^prompts\[1\]: "):
        llm.chat([[{"role": "user", "content": "hello"}], [{"role": "user"}]], GREEDY, use_tqdm=False)
    no_conversations: list[Any] = [{"role": "user", "content": "hello"}, "hello", None, [], [[]]]
    for wrong in no_conversations:
        with pytest.raises(RequestError, match=r"^messages must be a list"):
            llm.chat(wrong, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match=r"^(?!prompts)"):
        llm.generate(prompts[17], GREEDY, use_tqdm=False)


def test_a_model_in_memory_runs_on_its_own_weights() -> None:
    """They are not copied, and new ones can be set."""
    module, params = module_and_params(seed=3)
    table = params["embed"]["table"]
    index = table.unsafe_buffer_pointer()
    with LLM(model=(module, params), **ENGINE_ARGS) as llm:
        [first] = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert first.outputs[0].text == "" and len(first.outputs[0].token_ids) == 8
        assert llm._engine is not None
        assert llm._engine._runner._params["embed"]["table"].unsafe_buffer_pointer() == index
        _, others = module_and_params(seed=4)
        llm.update_weights(others)
        [second] = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert second.outputs[0].token_ids != first.outputs[0].token_ids
        llm.update_weights(params)
        [third] = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert ids_of([third]) == ids_of([first])
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.generate("text", GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="without a tokenizer"):
            llm.get_tokenizer()
        with pytest.raises(ConfigError, match="differ"):
            llm.update_weights({"embed": params["embed"]})
    assert not table.is_deleted(), "the caller's weights were taken away"
    outputs = jaxpaged.generate((module, params), [[1, 2, 3]], GREEDY, engine_args=ENGINE_ARGS, use_tqdm=False)
    assert outputs[0].outputs == first.outputs


def test_a_model_in_memory_can_have_a_tokenizer(model_path: Path) -> None:
    with LLM(model=module_and_params(), tokenizer=str(model_path), **ENGINE_ARGS) as llm:
        [output] = llm.generate("hi", GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == (ord("h") - 33, ord("i") - 33) and output.outputs[0].text


@pytest.mark.parametrize("model", [5, None, ("a", "b"), (nnx.Rngs(0), {})], ids=repr)
def test_a_bad_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="pair"):
        LLM(model=model)


# Engine arguments, life and death


def test_unknown_engine_arguments_are_refused_with_a_suggestion(model_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_sequences; did you mean max_num_seqs"):
        LLM(model=str(model_path), max_num_sequences=4)
    with pytest.raises(ConfigError, match="max_num_seqs must be"):
        LLM(model=str(model_path), max_num_seqs=0)
    with pytest.raises(ConfigError, match="enable_prefix_caching must be True or False"):
        LLM(model=str(model_path), enable_prefix_caching="false")


@pytest.mark.parametrize("arguments", [
    {"tensor_parallel_size": 2}, {"quantization": "awq"},
    {"scheduling_policy": "shortest"}, {"kv_cache_dtype": "int4"},
    {"load_format": "gguf"},
], ids=str)
def test_engine_arguments_that_cannot_work_are_errors_not_silence(model_path: Path, arguments: dict[str, Any]) -> None:
    [name] = arguments
    with pytest.raises(ConfigError, match=name.replace("_", "[_-]")):
        LLM(model=str(model_path), **ENGINE_ARGS, **arguments).shutdown()


def test_a_missing_model_and_too_long_a_context(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError), match="nowhere"):
        LLM(model=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="--max-model-len 129 is more than the model's context of 128"):
        LLM(model=str(model_path), max_model_len=CONTEXT + 1)


def test_a_shorter_context_can_be_asked_for(model_path: Path) -> None:
    with LLM(model=str(model_path), max_model_len=32, max_num_batched_tokens=2, max_num_seqs=2,
             enforce_eager=True) as llm:
        assert llm.info.max_model_len == 32
        with pytest.raises(ContextLengthError):
            llm.generate([[1] * 30], GREEDY, use_tqdm=False)
        check_greedy(llm.generate([[1] * 24], GREEDY, use_tqdm=False))


def test_a_priority_for_each_prompt(llm: LLM, model_path: Path) -> None:
    """With two slots: those of the smallest numbers are admitted first."""
    prompts = [random_prompt(20, seed) for seed in range(6)]
    with LLM(model=str(model_path), **ENGINE_ARGS | {"max_num_seqs": 2}, scheduling_policy="priority") as urgent:
        outputs = urgent.generate(prompts, GREEDY, use_tqdm=False, priority=[5, 4, 3, 2, 1, 0])
        check_greedy(outputs)
        began = [output.metrics.first_scheduled_time for output in outputs if output.metrics]
        assert began == sorted(began, key=lambda time: -(time or 0)) and len(set(began)) > 1
        with pytest.raises(RequestError, match="1 priorities for 2 prompts"):
            urgent.generate(prompts[:2], GREEDY, use_tqdm=False, priority=[1])
    with pytest.raises(RequestError, match="--scheduling-policy priority"):
        llm.generate(prompts[:1], GREEDY, use_tqdm=False, priority=[1])


def test_an_llm_that_was_shut_down_says_so(model_path: Path) -> None:
    llm = LLM(model=str(model_path), **ENGINE_ARGS)
    llm.shutdown()
    llm.shutdown()
    for call in (lambda: llm.generate("x", GREEDY), lambda: llm.get_metrics(), lambda: llm.update_weights({}),
                 lambda: llm.chat([{"role": "user", "content": "x"}], GREEDY), lambda: jaxpaged.generate(llm, "x")):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


def test_shutting_down_frees_the_model(model_path: Path) -> None:
    before = large_arrays()
    llm = LLM(model=str(model_path), **ENGINE_ARGS)
    llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert len(large_arrays(before)) > 10
    llm.shutdown()
    assert not large_arrays(before)


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Python's own handler, which it does not install where it was started with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def in_step(monkeypatch: pytest.MonkeyPatch, number: int, happens: Callable[[], None]) -> None:
    """Let something happen in the middle of a step, counted from now on."""
    dispatch, calls = ModelRunner.dispatch, list[int]()

    def disturbed(self: ModelRunner, step: SchedulerOutput) -> StepInFlight:
        calls.append(1)
        if len(calls) == number:
            happens()
        return dispatch(self, step)

    monkeypatch.setattr(ModelRunner, "dispatch", disturbed)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_leaves_a_usable_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the call, but not in the middle of a step: then blocks that were never written would count as cached.

    What was complete by then is not lost.
    """
    prompts = [random_prompt(20, number) for number in range(6)]
    params = [replace(GREEDY, max_tokens=1 if number == 1 else GREEDY.max_tokens) for number in range(6)]
    with monkeypatch.context() as patch:
        in_step(patch, 6, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(jaxpaged.errors.GenerationInterrupted, match="1 of 6 prompts were complete") as interrupted:
            llm.generate(prompts, params, use_tqdm=False)
    assert isinstance(interrupted.value, KeyboardInterrupt)
    assert [output is not None for output in interrupted.value.outputs] == [number == 1 for number in range(6)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    check_greedy(outputs)


@pytest.mark.usefixtures("default_sigint")
def test_a_step_that_fails_is_the_end_of_an_llm(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C, which does not wait, too. The memory is free again, and each further call says why."""
    before = large_arrays()

    def out_of_memory() -> None:
        raise RuntimeError("the device is full")

    def impatient() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    for happens, error in ((out_of_memory, RuntimeError), (impatient, KeyboardInterrupt)):
        llm = LLM(model_path, **ENGINE_ARGS)
        with monkeypatch.context() as patch:
            in_step(patch, 3, happens)
            with pytest.raises(error):
                llm.generate([[1, 2, 3], [4, 5]], GREEDY, use_tqdm=False)
        with pytest.raises(EngineDeadError, match=error.__name__):
            llm.generate([[1]], GREEDY, use_tqdm=False)
        llm.shutdown()
        assert not large_arrays(before)


def test_threads_take_turns(llm: LLM) -> None:
    prompts = [[random_prompt(20, 3 * thread + number) for number in range(3)] for thread in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for outputs in threads.map(lambda batch: llm.generate(batch, GREEDY, use_tqdm=False), prompts):
            check_greedy(outputs)


def test_metrics_count(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    before = llm.get_metrics()
    llm.generate([[1] * 20, [2] * 5], SamplingParams(n=2, max_tokens=6, ignore_eos=True), use_tqdm=False)
    after = llm.get_metrics()
    gained = {name: after[name] - before[name] for name in after}
    assert gained["vllm:prompt_tokens"] == 25 and gained["vllm:generation_tokens"] == 24
    assert gained["vllm:request_success"] == 2
    assert gained["vllm:e2e_request_latency_seconds_count"] == 2
    assert gained["vllm:iteration_tokens_total_sum"] == 20 + 5 + 4 * 5
    assert gained["vllm:prefix_cache_queries"] == 25 and gained["vllm:prefix_cache_hits"] == 0
    assert gained["jaxpaged:compilations"] == 0
    assert 0 < after["jaxpaged:kv_internal_fragmentation_ratio_mean"] < 1
