"""512 streams at once: none loses, doubles or mixes up a chunk."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.live_server import LiveServer
from tests.support.scripted_model import write_counting_model

STREAMS = 512


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("streams")
    with LiveServer(folder / "log", str(write_counting_model(folder / "model")), "--max-num-seqs", "64",
                    "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "600",
                    "--disable-access-log", "--enforce-eager") as live:
        yield live.wait_ready()


async def follow(client: httpx.AsyncClient, number: int) -> None:
    count = 4 + number % 8
    body = {"prompt": [number % 256], "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True, "request_id": f"stream-{number}", "stream_options": {"include_usage": True}}
    ids: list[int] = []
    done = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done += 1
            elif line:
                assert not done
                event = json.loads(line.removeprefix("data: "))
                assert event["id"] == f"cmpl-stream-{number}"
                ids += [token for choice in event["choices"] for token in choice.get("token_ids", ())]
    assert done == 1
    assert ids == [(number + 1 + index) % 256 for index in range(count)]
    assert event["usage"]["completion_tokens"] == count


def test_512_streams(server: LiveServer) -> None:
    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as client:
            await asyncio.gather(*(follow(client, number) for number in range(STREAMS)))

    asyncio.run(run())
    server.wait_idle(5)
    assert server.metrics()["vllm:request_success_total length"] == STREAMS
    assert "Traceback" not in server.log
