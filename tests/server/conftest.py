"""Fixtures for modules that define `server`, a live server of the default model."""

from collections.abc import Iterator

import httpx
import pytest

from jaxpaged.core.config import DEFAULT_MODEL
from jaxpaged.loading.hub import resolve_model
from jaxpaged.text.tokenizer import Tokenizer
from jaxpaged.text.tokenizer_files import load_tokenizer
from tests.support.live_server import LiveServer


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(DEFAULT_MODEL))
