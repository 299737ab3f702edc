"""What all tests share: one compilation cache, models and engines, the workloads."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from jaxpaged.core.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from jaxpaged.engine.llm import LLM
    from tests.support.live_server import LiveServer
    from tests.support.tiny_engine import MakeEngine

ROOT = Path(__file__).resolve().parents[1]
pytest_plugins = ["tests.support.rooms"]

# One cache for the whole run, child processes included, and none of it in the user's own. Set before JAX is imported.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache-test"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Tests run on the CPU and compile for absent GPUs; the plugin that does so looks for one unless told.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# How long an example takes says nothing on a shared machine.
settings.register_profile("jaxpaged", deadline=None)
settings.load_profile("jaxpaged")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's .gguf file, downloaded once into the user's cache."""
    from jaxpaged.loading.hub import resolve_model

    return Path(resolve_model(DEFAULT_MODEL))


@pytest.fixture(scope="session")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[LiveServer]":
    """The server as it starts without a flag; shared by the files that `SAME_WORKER` keeps together."""
    from tests.support.live_server import LiveServer

    with LiveServer(tmp_path_factory.mktemp("server") / "log") as live:
        yield live.wait_ready()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    from tests.support.tiny_llama import write_model

    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def make_engine(model_path: Path) -> "Iterator[MakeEngine]":
    """Makes engines of the tiny model and ends them after the module."""
    from tests.support.tiny_engine import engines

    with engines(model_path) as make:
        yield make


@pytest.fixture(scope="session")
def llm(model_path: Path) -> "Iterator[LLM]":
    """The tiny model, with room for all that a test asks; shared, so it must be left as it was found."""
    from jaxpaged.engine.llm import LLM
    from tests.support.tiny_llama import COMPILED_ARGS

    with LLM(str(model_path), **COMPILED_ARGS) as found:
        yield found


@pytest.fixture(scope="session")
def few_blocks(model_path: Path) -> "Iterator[LLM]":
    """The same with so few blocks that requests are preempted."""
    from jaxpaged.engine.llm import LLM
    from tests.support.tiny_engine import FEW_BLOCKS
    from tests.support.tiny_llama import COMPILED_ARGS

    with LLM(str(model_path), **COMPILED_ARGS | FEW_BLOCKS) as found:
        yield found


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the native kernels are compiled, once for all processes of the run."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "native"


@pytest.fixture(scope="session")
def workload_folder() -> Path:
    """The folder with W1.json to W5.json beside the checkout; what needs it is skipped without."""
    folder = ROOT.parent / "shared" / "workloads"
    if not folder.is_dir():
        pytest.skip(f"there are no workloads in {folder}")
    return folder
