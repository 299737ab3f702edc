"""Embeddings against transformers, in Python and over HTTP."""

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.core.errors import NotSupportedError, RequestError
from tests.support.live_server import LiveServer
from tests.support.tiny_llama import COMPILED_ARGS, ENGINE_ARGS, random_prompt, write_model

# More than 64 tokens take several rounds of the program, more than 16 several steps.
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127)
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("embeddings") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[np.ndarray]]:
    """What transformers makes of PROMPTS, by pooling, not normalized."""
    torch = pytest.importorskip("torch", reason="the reference needs PyTorch")
    from transformers import AutoModel

    reference = AutoModel.from_pretrained(model, dtype=torch.float32)
    states = []
    with torch.no_grad():
        for prompt in PROMPTS:
            states.append(reference(torch.tensor([prompt])).last_hidden_state[0].numpy())
    return {"last": [state[-1] for state in states], "mean": [state.mean(axis=0) for state in states]}


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model=str(model), enable_embeddings=True, **COMPILED_ARGS) as found:
        yield found


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_equal_transformers(llm: LLM, expected: dict[str, list[np.ndarray]], pooling: str) -> None:
    programs = llm.get_metrics()["jaxpaged:compilations"]
    for _ in range(2):  # all at once, which the pool cannot hold; then with their prefixes cached
        outputs = llm.embed(PROMPTS, use_tqdm=False, pooling=pooling, normalize=False)
        for output, prompt, vector in zip(outputs, PROMPTS, expected[pooling], strict=True):
            assert output.prompt_token_ids == tuple(prompt)
            np.testing.assert_allclose(output.outputs.embedding, vector, rtol=0, atol=2e-5 * np.abs(vector).max())
    [output] = llm.embed([PROMPTS[3]], use_tqdm=False, pooling=pooling)
    vector = expected[pooling][3]
    np.testing.assert_allclose(output.outputs.embedding, vector / np.linalg.norm(vector), atol=1e-5)
    assert llm.get_metrics()["jaxpaged:compilations"] == programs


def test_concurrent_generation_is_unchanged(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    before = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:4], params, use_tqdm=False)]
    llm.embed(PROMPTS, use_tqdm=False)
    assert before == [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:4], params, use_tqdm=False)]


def test_what_is_refused(llm: LLM, model: Path) -> None:
    bad: list[tuple[list[int], str]] = [([], "last"), ([999], "last"), ([1] * 128, "last"), ([1], "max")]
    for prompt, pooling in bad:
        with pytest.raises(RequestError):
            llm.embed([prompt], use_tqdm=False, pooling=pooling)
    with LLM(model=str(model), **ENGINE_ARGS) as plain, pytest.raises(NotSupportedError, match="enable_embeddings"):
        plain.embed("a")


def test_over_http(model: Path, expected: dict[str, list[np.ndarray]], tmp_path: Path) -> None:
    with LiveServer(tmp_path / "log", str(model), "--served-model-name", "m", "--max-num-seqs", "4",
                    "--max-num-batched-tokens", "16", "--num-gpu-blocks-override", "33", "--enable-embeddings",
                    "--enforce-eager") as live:
        live.wait_ready()
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="EMPTY", max_retries=0)
        answer = client.embeddings.create(model="m", input=PROMPTS[:5])  # which asks for base64 and reads it
        assert [item.index for item in answer.data] == list(range(5))
        for item, vector in zip(answer.data, expected["last"], strict=False):
            np.testing.assert_allclose(item.embedding, vector / np.linalg.norm(vector), atol=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(LENGTHS[:5])

        def post(**body: Any) -> httpx.Response:
            return httpx.post(f"{live.url}/v1/embeddings", json=body)

        for text in ("hello", ["hello"], list(b"hello")):
            assert post(input=text, pooling="mean").status_code == 200
        floats = post(input=PROMPTS[4], pooling="mean", normalize=False).json()["data"][0]["embedding"]
        np.testing.assert_allclose(floats, expected["mean"][4], atol=1e-4)
        packed = post(input=PROMPTS[4], pooling="mean", normalize=False, encoding_format="base64").json()
        assert struct.unpack("<64f", base64.b64decode(packed["data"][0]["embedding"])) == pytest.approx(floats)
        last = post(input=PROMPTS[4][-5:]).json()
        cut = post(input=PROMPTS[4], truncate_prompt_tokens=5).json()
        assert cut["usage"]["prompt_tokens"] == 5
        assert cut["data"][0]["embedding"] == pytest.approx(last["data"][0]["embedding"], abs=1e-5)
        bad: list[tuple[dict[str, Any], str]] = [
            ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({}, "input"), ({"input": []}, "input"), ({"input": ""}, "input"), ({"input": [True]}, "input"),
            ({"input": "a", "dimensions": 8}, "dimensions"), ({"input": "a", "pooling": "x"}, "pooling"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format")]
        for body, param in bad:
            refused = post(**body)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert post(input="a" * 200).json()["error"]["code"] == "context_length_exceeded"
        live.wait_for(lambda: live.metrics()["vllm:num_requests_running"] == 0, 5)
