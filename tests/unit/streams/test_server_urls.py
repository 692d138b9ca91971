"""Credentials in NATS URLs reach the server as they were meant, and nobody else."""

import pytest

from streams.server_urls import InvalidServerUrl, ServerUrls, parse_server_urls, redact


@pytest.mark.parametrize(
    ("text", "addresses", "credentials"),
    [
        ("nats://h:4222", ("nats://h:4222",), (None, None, None)),
        ("h", ("nats://h:4222",), (None, None, None)),
        ("a:1,b:2", ("nats://a:1", "nats://b:2"), (None, None, None)),
        ("nats://a:1, nats://b", ("nats://a:1", "nats://b:4222"), (None, None, None)),
        ("tls://u:p@h:1", ("tls://h:1",), ("u", "p", None)),
        ("nats://t0k3n@h:1", ("nats://h:1",), (None, None, "t0k3n")),
        ("nats://u:p%40s%2Fw%2C1%25@h:1", ("nats://h:1",), ("u", "p@s/w,1%", None)),
        ("nats://u:p@s/w,1@h:1", ("nats://h:1",), ("u", "p@s/w,1", None)),
        ("nats://u:p@a:1,b:2", ("nats://a:1", "nats://b:2"), ("u", "p", None)),
        ("nats://u:p@a:1,nats://u:p@b:2", ("nats://a:1", "nats://b:2"), ("u", "p", None)),
        ("nats://u:p@[::1]:4222/", ("nats://[::1]:4222",), ("u", "p", None)),
    ],
)
def test_addresses_and_credentials_are_told_apart(
    text: str, addresses: tuple[str, ...], credentials: tuple[str | None, ...]
) -> None:
    """A password may hold what separates the parts of a URL, encoded or not."""
    found = parse_server_urls(text)
    assert found == ServerUrls(addresses, *credentials)
    assert not any(secret and secret in repr(found) for secret in credentials[1:])


@pytest.mark.parametrize(
    "text", ["", "http://u:hunter2@h", "nats://u:hunter2@", "nats://u:hunter2@h:port", "nats://a/b"]
)
def test_what_is_no_url_of_nats_is_told_without_its_secrets(text: str) -> None:
    """The message is printed at the start, into a log that many may read."""
    with pytest.raises(InvalidServerUrl, match="nats://host:port") as refused:
        parse_server_urls(text)
    assert "hunter2" not in str(refused.value)


def test_servers_of_one_cluster_have_the_same_credentials() -> None:
    """One connection moves between them; what would be sent to the second one is not known."""
    with pytest.raises(InvalidServerUrl, match="different credentials"):
        parse_server_urls("nats://u:p@a,nats://v:q@b")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no NATS at nats://u:p@h:1: refused", "no NATS at nats://***@h:1: refused"),
        ('{"url":"nats://tok@h","mail":"a@b"}', '{"url":"nats://***@h","mail":"a@b"}'),
        ("nats://u:p@ss@h", "nats://***@h"),
        ("nothing to hide@home", "nothing to hide@home"),
    ],
)
def test_credentials_are_removed_from_any_text(text: str, shown: str) -> None:
    """Libraries write URLs into their errors."""
    assert redact(text) == shown
