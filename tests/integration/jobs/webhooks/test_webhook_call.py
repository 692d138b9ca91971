"""One webhook on real sockets: which addresses are connected to, and what counts as an answer."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from jobs.webhooks.webhook_call import WebhookAnswer, WebhookCaller
from registry.webhook_policy import WebhookPolicy
from tests.support.certificates import CertificateAuthority
from tests.support.webhook_receiver import WebhookReceiver, webhook_receiver

LOCAL = WebhookPolicy((ip_network("127.0.0.0/8"),))
NAME = "hooks.example.com"


async def post(policy: WebhookPolicy, url: str, seconds: float = 20.0) -> WebhookAnswer:
    caller = WebhookCaller(policy, seconds)
    try:
        return await caller.post(url, {"webhook-id": "evt_1"}, b"{}")
    finally:
        caller.close()


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Have the name resolve to one address after the other; returns what was asked for."""
    real: Callable[..., Any] = socket.getaddrinfo
    asked: list[str] = []

    def answer_with(*addresses: str) -> list[str]:
        left = list(addresses)

        def answer(host: Any, port: Any, *args: Any, **options: Any) -> Any:
            if host != NAME:
                return real(host, port, *args, **options)
            asked.append(host)
            return real(left.pop(0), port, *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", answer)
        return asked

    return answer_with


async def test_a_name_is_resolved_once_and_that_address_is_called(
    resolve: Callable[..., list[str]],
) -> None:
    """A later answer of the resolver leads nowhere."""
    asked = resolve("127.0.0.1", "10.0.0.1")
    async with webhook_receiver() as receiver:
        answer = await post(LOCAL, f"http://{NAME}:{receiver.port}/a?b=c")
        assert (answer.status, asked) == (204, [NAME])
        (webhook,) = receiver.received
        assert webhook.path == "/a?b=c"
        assert webhook.headers["host"] == f"{NAME}:{receiver.port}"
        assert webhook.headers["content-type"] == "application/json"


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "::ffff:127.0.0.1"])
async def test_a_public_name_of_a_private_address_gets_no_connection(
    resolve: Callable[..., list[str]], address: str
) -> None:
    """Its tenant is not told where it leads."""
    resolve(address)
    async with webhook_receiver() as receiver:
        answer = await post(WebhookPolicy(), f"https://{NAME}:{receiver.port}/")
        assert answer.error == "the host is not one to which webhooks may be sent"
        assert receiver.received == []


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ("200 OK", 200),
        ("301 Moved\r\nLocation: http://127.0.0.1:1/", 301),
        ("103 Early\r\nLink: <x>\r\n\r\nHTTP/1.1 202 Taken", 202),
    ],
)
async def test_the_status_of_the_final_answer_counts(told: str, status: int) -> None:
    """Interim answers are passed over, and no redirect is followed."""
    async with webhook_receiver(lambda webhook: told) as receiver:
        assert (await post(LOCAL, receiver.url)).status == status
        assert len(receiver.received) == 1


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("nonsense\r\n", "the answer is no HTTP"),
        ("200 OK\r\nX: " + "x" * 100_000, "the connection was closed without an HTTP answer"),
    ],
)
async def test_what_is_no_answer_is_told(told: str, reason: str) -> None:
    """An endless head is not read to its end."""
    async with webhook_receiver(lambda webhook: told) as receiver:
        assert await post(LOCAL, receiver.url) == WebhookAnswer(error=reason)


async def test_an_endpoint_that_does_not_answer_is_left() -> None:
    """After the time that a webhook may take."""
    async with webhook_receiver(lambda webhook: None) as receiver:
        answer = await post(LOCAL, receiver.url, 0.3)
        assert answer == WebhookAnswer(error="no answer within 0.3 s")


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_a_certificate_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    """By the authorities of the machine, and for the host's name."""
    authority = CertificateAuthority(tmp_path)
    files = authority.make_server()
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files["tls_cert"], files["tls_key"])
    receiver = WebhookReceiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=context)
    try:
        port = server.sockets[0].getsockname()[1]
        answer = await post(LOCAL, f"https://localhost:{port}/")
        assert answer.status == (204 if is_trusted else None)
        assert is_trusted or answer.error.startswith("TLS failed")
        assert len(receiver.received) == is_trusted
    finally:
        server.close()
