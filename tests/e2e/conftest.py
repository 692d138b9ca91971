"""One `millstream up --model mock` for all tests that only talk to it."""

from collections.abc import Iterator

import pytest

from tests.support.millstream_up import KEY, MillstreamUp


@pytest.fixture(scope="session")
def mock_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MillstreamUp]:
    """Quick mock tokens, the key `sk-e2e`. Do not kill what is in it."""
    words = ["--model", "mock", "--mock-ttft-ms", "5", "--mock-itl-ms", "2", "--api-key", KEY]
    with MillstreamUp(tmp_path_factory.mktemp("up"), *words) as up:
        yield up.wait_until_ready()
