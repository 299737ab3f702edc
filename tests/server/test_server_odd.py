"""A server of odd sizes with few blocks, and a model that can fail: every prompt length, any mixture of parameters,
several end tokens, and numbers that are none.
"""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.execution.test_logprobs import log_softmax
from tests.support.live_server import LiveServer
from tests.support.tiny_llama import CONFIG, CONTEXT, EOS, Reference, random_prompt, random_weights, write_model

BAD_ID = 200  # its embedding is not a number; greedy texts lack it
WEIGHTS = random_weights()
WEIGHTS["lm_head.weight"][BAD_ID] = 0
REFERENCE = Reference(CONFIG, WEIGHTS)
MORE_ENDS = [EOS - 1, EOS - 2]  # besides the one of config.json and the tokenizer
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("odd")
    model = write_model(folder / "model")
    embeddings = WEIGHTS["model.embed_tokens.weight"].copy()
    embeddings[BAD_ID] = np.nan
    save_file({**WEIGHTS, "model.embed_tokens.weight": embeddings}, model / "model.safetensors")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": MORE_ENDS}))
    with LiveServer(folder / "log", str(model), "--max-num-seqs", "5", "--max-num-batched-tokens", "13",
                    "--num-gpu-blocks-override", "10", "--enable-embeddings") as live:
        yield live.wait_ready()


@pytest.fixture(autouse=True)
def nothing_compiles_and_all_is_given_back(server: LiveServer) -> Iterator[None]:
    before = server.metrics()["jaxpaged:compilations_total"]
    yield
    server.wait_idle(5)
    assert server.metrics()["jaxpaged:compilations_total"] == before
    assert "Traceback" not in server.log and "donat" not in server.log.lower()


def post(server: LiveServer, path: str = COMPLETIONS, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def complete(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = post(server, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()["choices"][0]
    return answer


def prompt_of(length: int) -> list[int]:
    return [0 if token == BAD_ID else token for token in random_prompt(length, length)]


# Sizes


def test_every_prompt_length(server: LiveServer) -> None:
    """First tokens, and the log probabilities of all, in steps of 13 tokens."""

    def check(length: int) -> None:
        prompt, count = prompt_of(length), 2
        answer = complete(server, prompt=prompt, max_tokens=count, temperature=0, logprobs=2, ignore_eos=True,
                          echo=bool(length % 2), return_token_ids=True)
        ids = answer["token_ids"][len(prompt) if length % 2 else 0 :]
        assert len(ids) == count and REFERENCE.error(prompt, ids) is None
        wanted = log_softmax(REFERENCE.logits([*prompt, *ids]))[range(length + count - 1), [*prompt[1:], *ids]]
        found = answer["logprobs"]["token_logprobs"][length % 2 :]  # the first of a prompt has none
        assert np.allclose(found, wanted[-len(found) :], atol=1e-4)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(check, [*range(1, 70), 96, 97, CONTEXT - 3, CONTEXT - 2]))


# Mixtures


CHOICES: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 1.3], "n": [1, 2, 3], "top_k": [0, -1, 1, 5], "top_p": [0.1, 0.9, 1], "min_p": [0, 0.1],
    "stop": ["a", ["e", " "], ["\n", "é", "th"], ["\ufffd"], ["\ufffd\ufffd", "\ufffd"], ["x", "xy", "y"]],
    "include_stop_str_in_output": [True], "min_tokens": [1, 2], "ignore_eos": [True], "skip_special_tokens": [False],
    "stop_token_ids": [[3, 50, 99, 130, 180, 222]], "presence_penalty": [-2, 2], "frequency_penalty": [-1, 1.5],
    "repetition_penalty": [0.5, 1.3], "bad_words": [["the", "e "]], "allowed_token_ids": [list(range(0, 257, 9))],
    "truncate_prompt_tokens": [1, 3], "structured_outputs": [{"regex": "[a-z]{1,8}"}, {"choice": ["yes", "maybe é"]}],
    "return_token_ids": [True],
}
TEXTS = ["a", "Hello", " ", "é", "你好", "🎉", "👩‍👩‍👧", "\n", "<", "\u202e", "\0"]


def draw(number: int) -> tuple[str, dict[str, Any]]:
    """A route and a body, the same for each number."""
    rng = random.Random(number)
    path = rng.choice([COMPLETIONS, CHAT])
    text = "".join(rng.choices(TEXTS, k=rng.randint(1, 6)))
    body: dict[str, Any] = {"max_tokens": rng.choice([2, 3, 9, 17]), "seed": number, "logit_bias": {str(BAD_ID): -100}}
    body |= {name: rng.choice(values) for name, values in CHOICES.items() if rng.random() < 0.3}
    if "structured_outputs" in body:
        for name in ("allowed_token_ids", "bad_words"):  # which may leave no token
            body.pop(name, None)
    if path == CHAT:
        return path, body | {"messages": [{"role": "user", "content": text}]} | rng.choice(
            [{}, {"logprobs": True, "top_logprobs": 3}])
    return path, body | {"prompt": rng.choice([text, [text, "b"], [[1, 2, 3] * 9, [5]]])} | rng.choice(
        [{}, {"logprobs": 0}, {"logprobs": 3}, {"logprobs": 1, "echo": True}, {"echo": True}])


def joined(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choice index -> its content in a whole answer."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        whole = found.setdefault(choice["index"], {"text": "", "logprobs": {}, "token_ids": [], "finish_reason": None})
        assert whole["finish_reason"] is None, "new output of a choice that has ended"
        whole["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"].setdefault(name, []).extend(values)
        whole["token_ids"] += choice.get("token_ids", [])
        whole |= {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}
    return found


def strictly(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in an answer"))


def check_stream(server: LiveServer, number: int) -> None:
    path, body = draw(number)
    response = post(server, path, **body)
    assert response.status_code == 200, (body, response.text)
    whole = strictly(response.text)
    with httpx.stream("POST", server.url + path, timeout=60,
                      json={**body, "stream": True, "stream_options": {"include_usage": True}}) as streamed:
        lines = [line.removeprefix("data: ") for line in streamed.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    *events, last = map(strictly, lines)
    found = joined(events)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name], body
    assert sorted(found) == list(range(len(whole["choices"])))
    for choice in whole["choices"]:
        again = found[choice["index"]]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert (again["text"], again["finish_reason"], again["stop_reason"]) == (
            text, choice["finish_reason"], choice["stop_reason"]), body
        assert again["token_ids"] == choice.get("token_ids", []), body
        assert flat(again["logprobs"]) == pytest.approx(flat(choice["logprobs"] or {}), abs=1e-4), body
        if choice["logprobs"]:
            assert len({len(values) for values in choice["logprobs"].values()}) == 1, body


def flat(value: Any) -> dict[str, Any]:
    """Every leaf of a JSON value by its path."""
    if isinstance(value, (dict, list)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {f"{key}/{rest}": leaf for key, item in pairs for rest, leaf in flat(item).items()}
    return {"": value}


@pytest.mark.parametrize("numbers", [range(30), pytest.param(range(30, 500), marks=pytest.mark.slow)])
def test_any_mixture_of_parameters_streamed_and_whole(server: LiveServer, numbers: range) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: check_stream(server, number), numbers))


# Ends


def test_the_ends_of_all_files_together(server: LiveServer) -> None:
    for end in (EOS, *MORE_ENDS):
        forced: dict[str, Any] = {"prompt": "ab", "max_tokens": 6, "logit_bias": {str(end): 100},
                                  "return_token_ids": True}
        answer = complete(server, **forced)
        assert (answer["token_ids"], answer["text"], answer["finish_reason"]) == ([end], "", "stop")
        exactly = complete(server, **{**forced, "max_tokens": 1})  # the limit falls on it
        assert (exactly["token_ids"], exactly["finish_reason"]) == ([end], "stop")
        ignoring = complete(server, **forced, ignore_eos=True)
        assert (ignoring["token_ids"], ignoring["finish_reason"]) == ([end] * 6, "length")
        held = complete(server, **forced, min_tokens=3)["token_ids"]
        assert held[3:] == [end] and not {EOS, *MORE_ENDS} & set(held[:3])
        own = complete(server, **forced, ignore_eos=True, stop_token_ids=[end])
        assert (own["token_ids"], own["finish_reason"], own["stop_reason"]) == ([end], "stop", end)


# Numbers that are none


@pytest.mark.parametrize(("path", "body"), [
    (COMPLETIONS, {"temperature": 0}), (COMPLETIONS, {"n": 3}), (COMPLETIONS, {"n": 1, "best_of": 2}),
    (COMPLETIONS, {"logprobs": 2, "min_tokens": 2}), (COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 0}),
    (COMPLETIONS, {"prompt_logprobs": 0}), (COMPLETIONS, {"structured_outputs": {"regex": "a+"}}),
    (COMPLETIONS, {"use_beam_search": True, "n": 2}), ("/v1/embeddings", {}), ("/v1/embeddings", {"pooling": "mean"}),
], ids=lambda value: str(value)[:40])
def test_logits_that_are_not_finite_fail_only_their_request(server: LiveServer, path: str,
                                                            body: dict[str, Any]) -> None:
    before = server.metrics()["vllm:request_success_total error"]
    prompt = prompt_of(30)
    bad = [*prompt[:20], BAD_ID, *prompt[:5]]
    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(complete, server, prompt=prompt, max_tokens=20, temperature=0, ignore_eos=True,
                                 return_token_ids=True) for _ in range(3)]
        answer = post(server, path, **{"prompt" if path == COMPLETIONS else "input": bad}, **body)
        for other in others:
            assert REFERENCE.error(prompt, other.result()["token_ids"], 20) is None
    assert answer.status_code == 500 and "not finite" in answer.json()["error"]["message"]
    server.wait_for(lambda: server.metrics()["vllm:request_success_total error"] == before + 1, 10)
    if path == COMPLETIONS and "best_of" not in body and "prompt_logprobs" not in body:
        with httpx.stream("POST", server.url + path, json={"prompt": bad, **body, "stream": True}) as streamed:
            lines = [line.removeprefix("data: ") for line in streamed.iter_lines() if line]
        assert "not finite" in json.loads(lines[-2])["error"]["message"] and lines[-1] == "[DONE]"
