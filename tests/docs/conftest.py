"""A tiny model, and a server of it, for the commands of the documents and for the examples."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpaged.core.config import DEFAULT_MODEL
from tests.support.live_server import LiveServer, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A tiny model under the name of the default one, with all that the documents ask a server for."""
    with LiveServer(tmp_path_factory.mktemp("server") / "log", str(tiny_model), "--served-model-name", DEFAULT_MODEL,
                    "--enable-embeddings", "--enable-reset-prefix-cache", "--max-num-seqs", "4",
                    "--max-num-batched-tokens", "16", "--num-gpu-blocks-override", "600", "--enforce-eager") as live:
        yield live.wait_ready()
