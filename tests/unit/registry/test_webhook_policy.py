"""Webhooks go to public addresses alone, unless a setting says otherwise."""

from ipaddress import ip_network

import pytest

from registry.webhook_policy import (
    WebhookPolicy,
    WebhookRefused,
    WebhookTarget,
    parse_webhook_url,
)

PUBLIC = WebhookPolicy()
LOCAL = WebhookPolicy((ip_network("127.0.0.0/8"), ip_network("10.0.0.0/8")))
TARGET = WebhookTarget(True, "hooks.example.com", 443, "/")


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("https://Hooks.Example.com", WebhookTarget(True, "hooks.example.com", 443, "/")),
        ("https://h.example/a/b?c=d&e", WebhookTarget(True, "h.example", 443, "/a/b?c=d&e")),
        ("http://h.example:8080/", WebhookTarget(False, "h.example", 8080, "/")),
        ("https://[::1]:1/x", WebhookTarget(True, "::1", 1, "/x")),
    ],
)
def test_a_url_has_these_parts(url: str, wanted: WebhookTarget) -> None:
    """The path keeps its query."""
    assert parse_webhook_url(url) == wanted


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.example.com",
        "ftp://h.example/",
        "https://",
        "https:///path",
        "https://u@h.example/",
        "https://u:p@h.example/",
        "https://h.example/#part",
        "https://h.example/a b",
        "https://h.example/a\r\nX: y",
        "https://h.example\\@evil.example/",
        "https://münchen.example/",
        "https://h.example:0/",
        "https://h.example:99999/",
        "https://h.example/" + "a" * 2048,
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    """Before anything is stored; none can put a line of its own into a request."""
    with pytest.raises(ValueError):
        parse_webhook_url(url)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "240.0.0.1",
        "198.18.0.1",
        "::1",
        "::",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "::ffff:127.0.0.1",
        "64:ff9b::a00:1",
        "64:ff9b:1::a00:1",
        "2002:a00:1::1",
        "2001:db8::1",
    ],
)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    """In every way that it can be written, and as one of several."""
    with pytest.raises(WebhookRefused):
        PUBLIC.check_addresses(TARGET, ["93.184.215.14", address])


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_a_public_address_is_called(address: str) -> None:
    """With TLS; without it, nothing is sent over the public internet."""
    PUBLIC.check_addresses(TARGET, [address])
    with pytest.raises(WebhookRefused, match="use https"):
        LOCAL.check_addresses(TARGET._replace(is_tls=False), [address])


def test_a_network_of_the_setting_is_called_with_and_without_tls() -> None:
    """And no other one, nor where a cloud serves its metadata."""
    for is_tls in (True, False):
        LOCAL.check_addresses(TARGET._replace(is_tls=is_tls), ["127.0.0.1", "10.1.2.3"])
    with pytest.raises(WebhookRefused, match="--webhook-network"):
        LOCAL.check_addresses(TARGET, ["192.168.0.1"])
    everything = WebhookPolicy((ip_network("0.0.0.0/0"), ip_network("::/0")))
    with pytest.raises(WebhookRefused, match="no setting allows it"):
        everything.check_addresses(TARGET, ["169.254.169.254"])


@pytest.mark.parametrize("host", ["localhost", "a.localhost", "127.1", "2130706433", "0x7f.1"])
def test_this_machine_is_known_by_its_names(host: str) -> None:
    """Creation refuses it already."""
    target = parse_webhook_url(f"https://{host}/")
    with pytest.raises(WebhookRefused):
        PUBLIC.check_target(target)
    LOCAL.check_target(target)
