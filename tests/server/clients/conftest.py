"""The option and the fixture of the tests that run in environments of the clients."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--url", help="of the server, without /v1")


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.config.getoption("--url")
    return found
