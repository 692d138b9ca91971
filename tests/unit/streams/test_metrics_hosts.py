"""A page's own name is not one of this machine's, whatever it resolves to."""

import pytest

from streams.metrics_server import host_refusal, names_this_machine


@pytest.mark.parametrize(
    "host", [None, "", "localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:9100", "[::1]:9100"]
)
def test_addresses_and_localhost_are_this_machines(host: str | None) -> None:
    """Nobody can let these resolve otherwise."""
    assert names_this_machine(host)


@pytest.mark.parametrize(
    "host",
    ["page.example", "page.example:9100", "localhost.page.example", "[::1", "127.0.0.1.nip.io"],
)
def test_other_names_are_not(host: str) -> None:
    """Also those that only look like an address."""
    assert not names_this_machine(host)
    assert repr(host) in host_refusal(host)
