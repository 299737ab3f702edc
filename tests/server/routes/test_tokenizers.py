"""Tokenizers of other kinds than the default model's, each behind a live server with a random model, against
transformers' reading of the same files: beginning tokens, special tokens as text and as stops, spaces.
"""

import copy
import functools
import itertools
import json
import operator
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.llm import LLM
from jaxpaged.text.tokenizer import Tokenizer
from tests.support.live_server import LiveServer, flags_of
from tests.support.tiny_llama import CONFIG, ENGINE_ARGS, random_weights
from tests.support.tiny_tokenizers import CONTROL, byte_level_metadata, metaspace, sentencepiece_metadata, wrap

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MARK = "</mark>"  # a special token that ends nothing and begins like ordinary ones
TEMPLATE = ("{% if not bare %}{{ bos_token }}{% endif %}{% for message in messages %}"
            "[{{ message.role }} {{ message.name or '' }}]{{ message.content }}"
            "{% for call in message.tool_calls or [] %}{{ call.function.name }}/{{ call.function.arguments.a }}"
            "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")
VOCAB = 352  # of all models, so that they share their programs


def with_mark(metadata: dict[str, Any], *more: str) -> dict[str, Any]:
    """Metadata with further special tokens and our template."""
    tokens, names = "tokenizer.ggml.tokens", (*more, MARK)
    found = {**metadata, tokens: [*metadata[tokens], *names], "tokenizer.chat_template": TEMPLATE,
             "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], *[CONTROL] * len(names)]}
    if "tokenizer.ggml.scores" in metadata:
        found["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], *[0.0] * len(names)]
    return found


def byte_level() -> Tokenizer:
    """As Llama 3's: bytes, and a beginning token of its own."""
    metadata = with_mark(byte_level_metadata("llama-bpe"), "<|begin|>")
    return wrap(metadata | {"tokenizer.ggml.bos_token_id": len(metadata["tokenizer.ggml.tokens"]) - 2})


KINDS = {
    "sentencepiece": lambda: wrap(with_mark(sentencepiece_metadata())),  # as Llama 2's
    "byte level": byte_level,
    "metaspace": lambda: metaspace(with_mark(sentencepiece_metadata())),
    "no prefix": lambda: wrap(with_mark(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))),
}


@dataclass(frozen=True)
class ServedModel:
    """A server, and transformers' reading of its tokenizer's files."""

    kind: str
    folder: Path
    http: httpx.Client
    hf: PreTrainedTokenizerFast

    def post(self, path: str, **body: Any) -> Any:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, **body: Any) -> Any:
        """The only choice of a completion, asked for whole and streamed, which must say the same."""
        body = {"max_tokens": 1, "seed": 0, "return_token_ids": True, **body}
        whole = self.post(COMPLETIONS, **body)
        [choice] = whole["choices"]
        assert whole["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"])
        with self.http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as streamed:
            lines = [line.removeprefix("data: ") for line in streamed.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line)["choices"][0] for line in lines]
        for name, empty in (("text", ""), ("token_ids", []), ("prompt_token_ids", [])):
            assert functools.reduce(operator.add, (chunk.get(name, empty) for chunk in chunks)) == choice[name], name
        assert all(chunks[-1][name] == choice[name] for name in ("finish_reason", "stop_reason"))
        return choice

    def new_text(self, prompt: list[int], ids: list[int], skip: bool = True) -> str:
        """decode(prompt + output) without the prompt's text."""
        before, whole = (self.hf.decode(tokens, skip_special_tokens=skip) for tokens in (prompt, prompt + ids))
        assert whole.startswith(before)
        return whole[len(before):]


@pytest.fixture(scope="module", params=[
    pytest.param(kind, marks=[pytest.mark.slow] if kind in ("metaspace", "no prefix") else []) for kind in KINDS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    folder = tmp_path_factory.mktemp("tokenizers")
    model = folder / "model"
    tokenizer = KINDS[request.param]()
    tokenizer.hf.save_pretrained(model)
    config = {**CONFIG, "vocab_size": VOCAB, "eos_token_id": tokenizer.hf.eos_token_id,
              "max_position_embeddings": 256}
    assert len(tokenizer.hf) <= VOCAB
    (model / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config), model / "model.safetensors")
    with LiveServer(folder / "log", str(model), *flags_of(ENGINE_ARGS)) as live:
        live.wait_ready()
        with httpx.Client(base_url=live.url, timeout=60) as http:
            yield ServedModel(request.param, model, http, AutoTokenizer.from_pretrained(model))


# Beginning tokens


def test_exactly_one_beginning_token(served: ServedModel) -> None:
    hf, bos = served.hf, served.hf.bos_token_id
    wanted: dict[str, list[int]] = {}
    for text in ("hello world", " hello", "the\n"):
        plain = hf(text, add_special_tokens=False).input_ids
        assert hf(text).input_ids == [bos, *plain] and bos not in plain
        written = hf(hf.bos_token + text, add_special_tokens=False).input_ids
        assert written[0] == bos and written.count(bos) == 1
        for switch in (None, True, False):
            for prompt, expected in ((text, plain if switch is False else [bos, *plain]),
                                     (hf.bos_token + text, written)):
                body: dict[str, Any] = {"prompt": prompt, "add_special_tokens": switch}
                assert served.complete(**body)["prompt_token_ids"] == expected
                assert served.post("/tokenize", **body)["tokens"] == expected
        for ids in (plain, written, [bos, *written]):  # what comes as ids is taken as it is
            assert served.complete(prompt=ids)["prompt_token_ids"] == ids
        wanted |= {text: [bos, *plain], hf.bos_token + text: written}
    chats = [[{"role": "user", "content": content}] for content in ("hello world", " the", "")]
    for messages in chats:
        for bare, switch in itertools.product((False, True), (None, False, True)):
            expected = hf.apply_chat_template(messages, add_generation_prompt=True, bare=bare, return_dict=False)
            assert expected.count(bos) == (not bare)
            expected = [bos, *expected] if bare and switch else expected
            body = {"messages": messages, "add_special_tokens": switch, "chat_template_kwargs": {"bare": bare}}
            answer = served.post(CHAT, **body, max_tokens=1, return_token_ids=True)
            assert answer["prompt_token_ids"] == expected and answer["usage"]["prompt_tokens"] == len(expected)
            assert served.post("/tokenize", **body)["tokens"] == expected
    if served.kind in ("sentencepiece", "byte level"):  # and from Python
        with LLM(str(served.folder), **ENGINE_ARGS) as llm:
            found = llm.generate(list(wanted), SamplingParams(max_tokens=1), use_tqdm=False)
            assert [list(output.prompt_token_ids) for output in found] == list(wanted.values())
            found = llm.chat(chats, SamplingParams(max_tokens=1), use_tqdm=False)
            assert [list(output.prompt_token_ids) for output in found] == [
                hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) for messages in chats]


# Special tokens as text


def test_special_token_text_is_ordinary_in_chats_alone(served: ServedModel) -> None:
    hf = served.hf
    special = [hf.bos_token, hf.eos_token, MARK]
    ids = hf.convert_tokens_to_ids(special)

    def messages(texts: list[str]) -> list[dict[str, Any]]:
        bos, eos, mark = texts
        return [{"role": "system", "content": f"{bos}the{eos}"}, {"role": "user", "name": f"a{eos}", "content": mark},
                {"role": "assistant", "tool_calls": [{"type": "function", "function": {
                    "name": f"b{mark}", "arguments": json.dumps({"a": f"{bos} c{eos}"})}}]},
                {"role": "tool", "tool_call_id": "1", "name": mark, "content": f"d{eos}\n{eos}{bos}e"}]

    answer = served.post(CHAT, messages=messages(special), max_tokens=1, return_token_ids=True)
    found = answer["prompt_token_ids"]
    assert answer["usage"]["prompt_tokens"] == len(found)
    assert [number for number in found if number in ids] == [hf.bos_token_id, *[hf.eos_token_id] * 4]
    assert served.post("/tokenize", messages=messages(special))["tokens"] == found
    # Between the template's own tokens it is as transformers reads text in which nothing is special.
    stand_ins = ["\ue000", "\ue001", "\ue002"]
    rendered = hf.apply_chat_template([message | {"tool_calls": [
        {"function": {"name": "b\ue002", "arguments": {"a": "\ue000 c\ue001"}}}]} if message["role"] == "assistant"
        else message for message in messages(stand_ins)], tokenize=False, add_generation_prompt=True)
    expected: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, special))})", rendered):
        if piece in special:
            expected.append(hf.convert_tokens_to_ids(piece))
        elif piece:
            text = piece.translate({ord(char): name for char, name in zip(stand_ins, special, strict=True)})
            expected += between_special_tokens(hf, text)
    assert found == expected
    prompt = f"a{MARK} the{hf.eos_token}{MARK}\n"
    raw = served.complete(prompt=prompt)["prompt_token_ids"]
    assert raw == hf(prompt).input_ids
    assert [number for number in raw if number in ids] == [hf.bos_token_id, ids[2], ids[1], ids[2]]


def between_special_tokens(hf: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of a text after a special token, with nothing special in it."""
    backend = copy.deepcopy(hf.backend_tokenizer)
    backend.encode_special_tokens = True
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer.prepend_scheme = "never"  # only the very beginning of a prompt gets a marker
    return list(backend.encode(text, add_special_tokens=False).ids)


# Special tokens as stops


def test_a_stop_that_is_a_special_token_cuts_no_ordinary_character(served: ServedModel) -> None:
    hf = served.hf
    mark = hf.convert_tokens_to_ids(MARK)
    ordinary = hf("</ the < hello/m", add_special_tokens=False).input_ids
    prompt = hf("hello").input_ids
    body = {"prompt": prompt, "max_tokens": 30, "allowed_token_ids": [mark, *ordinary]}

    def check(seed: int, free: list[int], first: int) -> None:
        text = served.new_text(prompt, free[:first])
        for stop, skip, keep in itertools.product(({"stop_token_ids": [mark]}, {"stop": MARK}), (True, False, None),
                                                  (True, False)):
            found = served.complete(**body, **stop, seed=seed, skip_special_tokens=skip, logprobs=0,
                                    include_stop_str_in_output=keep)
            assert found["text"] == text + MARK * (keep and skip is False)
            assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop.get("stop", mark))
            assert found["token_ids"] == free[:first + 1]
            assert {len(values) for values in found["logprobs"].values()} == {first + 1}

    with ThreadPoolExecutor(4) as threads:
        runs = list(threads.map(lambda seed: served.complete(**body, seed=seed)["token_ids"], range(12)))
        firsts = {free.index(mark): (seed, free) for seed, free in enumerate(runs) if mark in free}
        assert len(firsts) >= 4
        list(threads.map(lambda first: check(*firsts[first], first), firsts))


# Spaces and characters


def test_new_text_is_that_of_prompt_and_output_together(served: ServedModel) -> None:
    hf = served.hf
    bos = hf.bos_token_id
    words = [number for number, token in enumerate(hf.convert_ids_to_tokens(range(len(hf))))
             if "\ufffd" not in hf.decode([number]) and not re.fullmatch("<0x[^2].>", token)]
    prompts = ["hello", "hello ", "  the  ", " ", "a\n", f"the{MARK} hello", f"{hf.bos_token}hello", [bos], [bos, bos],
               hf("the", add_special_tokens=False).input_ids]

    def check(prompt: str | list[int], seed: int, skip: bool) -> str:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 20, "seed": seed, "temperature": 2,
                                "skip_special_tokens": skip, "ignore_eos": True, "allowed_token_ids": words}
        choice = served.complete(**body)
        before, ids = choice["prompt_token_ids"], choice["token_ids"]
        expected = served.new_text(before, ids, skip)
        assert choice["text"] == expected and len(ids) == 20
        echoed = served.complete(**body, echo=True, logprobs=1 if seed == 1 else None)
        shown = prompt if isinstance(prompt, str) else hf.decode(before)
        assert echoed["text"] == shown + expected and echoed["token_ids"] == before + ids
        if echoed["logprobs"] is not None:
            check_offsets(served, prompt, echoed, skip)
        return expected

    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(check, *zip(*itertools.product(prompts, range(3), (True, False)), strict=True)))
    assert any(text[0] == " " for text in texts) and any(text[0] != " " for text in texts)
    assert any("  " in text for text in texts)


def check_offsets(served: ServedModel, prompt: str | list[int], echoed: dict[str, Any], skip: bool) -> None:
    """Each token begins in the text where the one before it has ended."""
    offsets, text, hf = echoed["logprobs"]["text_offset"], echoed["text"], served.hf
    ids = echoed["token_ids"]
    assert offsets[0] == 0 and offsets == sorted(offsets) and len(offsets) == len(ids)
    if served.kind != "byte level":
        return  # what others decode alone may lack its space
    for index, (start, end) in enumerate(itertools.pairwise([*offsets, len(text)])):
        own = index < len(echoed["prompt_token_ids"])  # of a prompt all is shown but what the tokenizer has added
        added = index == 0 and isinstance(prompt, str) and not prompt.startswith(hf.bos_token)
        assert text[start:end] == ("" if added else hf.decode([ids[index]], skip_special_tokens=skip and not own))


def test_a_text_of_a_given_form(served: ServedModel) -> None:
    """Characters of several tokens, and the text of a special token that is none."""
    if served.kind not in ("sentencepiece", "no prefix"):
        pytest.skip("for vocabularies with words and bytes")
    form = {"regex": f"( ?(hello|the)👍  ?é日本 ){{2}}{MARK} ?a"}
    prompt = served.hf("hello").input_ids

    def check(seed: int) -> None:
        choice = served.complete(prompt=prompt, max_tokens=100, seed=seed, temperature=1.5, structured_outputs=form)
        text = choice["text"]
        assert re.fullmatch(form["regex"], text) and choice["finish_reason"] == "stop"
        assert text == served.new_text(prompt, choice["token_ids"])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check, range(3)))
