"""Client libraries that others wrote, in environments of their own, and a model that says what a test wants."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.clients.cases import ENDLESS, KEY, MODEL, SCRIPTS
from tests.support.foreign_environments import environment, run
from tests.support.live_server import ROOT, LiveServer
from tests.support.scripted_model import write_scripted_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
# Two environments, so that the clients are tried with two major versions of openai, on which all of them rest.
NEWEST = ("clients-newest", "pytest", "pytest-asyncio", "openai>=3", "langchain-openai>=1",
          "pydantic-ai-slim[openai]>=2")
OLDER = ("clients-older", "pytest", "pytest-asyncio", "openai<3", "instructor>=1.15", "litellm>=1.100",
         "llama-index-llms-openai-like>=0.8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("clients")
    model = write_scripted_model(folder / "model", SCRIPTS, endless=ENDLESS, context=32768)
    with LiveServer(folder / "log", str(model), "--served-model-name", MODEL, "--api-key", KEY, "--max-num-seqs", "4",
                    "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "4200", "--enable-auto-tool-choice",
                    "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--enforce-eager") as live:
        yield live.wait_ready()


@pytest.mark.parametrize(("client", "packages"), [
    ("openai", NEWEST), ("openai", OLDER), ("langchain", NEWEST), ("pydantic_ai", NEWEST), ("instructor", OLDER),
    ("litellm", OLDER), ("llama_index", OLDER)], ids=lambda value: value if isinstance(value, str) else value[0])
def test_client(server: LiveServer, client: str, packages: tuple[str, ...], tmp_path: Path) -> None:
    folder = ROOT / "tests" / "server" / "clients"
    programs = environment(*packages)
    run(programs / "python", "-m", "pytest", "-c", "/dev/null", "--rootdir", folder, "--confcutdir", folder,
        "-p", "no:cacheprovider", "-q", "--url", server.url, "-o", "asyncio_mode=auto",
        "-o", "asyncio_default_fixture_loop_scope=function", folder / f"{client}_client.py", cwd=ROOT, env={
            "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYTHONDONTWRITEBYTECODE": "1"})
    assert "Traceback" not in server.log
