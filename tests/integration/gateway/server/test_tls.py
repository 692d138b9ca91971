"""TLS at the gateway: handshakes that fail, certificates that change, clients with certificates."""

import asyncio
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.server import tls_listener
from gateway.server.tls_certificate import CertificateUnusable
from gateway.service import run
from gateway.settings import GatewaySettings
from registry.tenants import CertificateTaken, Tenants
from streams.base_settings import TenantSettings
from tests.support.accounts_server import connect
from tests.support.certificates import CertificateAuthority
from tests.support.eventually import eventually
from tests.support.gateways import KEY, OTHER_KEY, RunningGateway, cell, gateways
from tests.support.services import always

ACME, OTHER, NOBODY = "spiffe://cell/acme", "spiffe://cell/other", "spiffe://cell/nobody"
MAPPED = {
    "acme": TenantSettings(keys=(KEY,), certificates=(ACME,)),
    "other": TenantSettings(keys=(OTHER_KEY,), certificates=(OTHER,)),
}


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "certificates")


@asynccontextmanager
async def tls_gateway(
    nats_url: str, authority: CertificateAuthority, **settings: Any
) -> AsyncIterator[RunningGateway]:
    """A gateway that serves TLS, with nothing behind it."""
    client = authority.client_context()
    async with gateways(nats_url, tls=client, **authority.make_server(), **settings) as (gateway,):
        yield gateway


async def outcomes(gateway: RunningGateway) -> Mapping[str, float]:
    """How many handshakes ended in each way."""
    text = (await gateway.request("GET", "/metrics", key=None)).body.decode()
    name = "millstream_tls_handshakes_total{outcome="
    found = (line.removeprefix(name).split("} ") for line in text.splitlines() if name in line)
    return {outcome.strip('"'): float(count) for outcome, count in found}


async def counts(gateway: RunningGateway, outcome: str, before: Mapping[str, float]) -> None:
    """Wait until one more handshake has ended in this way."""

    async def is_counted() -> bool:
        return (await outcomes(gateway)).get(outcome, 0) == before.get(outcome, 0) + 1

    await eventually(is_counted)


async def send_raw(gateway: RunningGateway, data: bytes) -> bytes:
    """All that the gateway answers to bytes that are sent without TLS."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    "sent", [b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00\x01garbage", b"G", bytes(200_000)]
)
async def test_who_speaks_without_tls_is_told_so(
    nats_url: str, authority: CertificateAuthority, sent: bytes
) -> None:
    """Over HTTP, as whoever sends an API key in the open needs to know it; and counted."""
    async with tls_gateway(nats_url, authority) as gateway:
        before = await outcomes(gateway)
        head, _, body = (await send_raw(gateway, sent)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert "https://" in json.loads(body)["error"]["message"]
        await counts(gateway, "plain", before)


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01" + b"x" * 600, b"\x16" * 70_000])
async def test_garbage_in_a_handshake_ends_it(
    nats_url: str, authority: CertificateAuthority, sent: bytes
) -> None:
    async with tls_gateway(nats_url, authority) as gateway:
        before = await outcomes(gateway)
        await send_raw(gateway, sent)
        await counts(gateway, "malformed", before)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
async def test_a_handshake_that_does_not_end_is_given_up(
    nats_url: str, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    async with tls_gateway(nats_url, authority) as gateway:
        before = await outcomes(gateway)
        monkeypatch.setattr(tls_listener, "HANDSHAKE_SECONDS", 0.5)
        assert await send_raw(gateway, sent) == b""
        monkeypatch.undo()
        await counts(gateway, "timeout", before)


async def test_the_longest_handshake_gives_way_to_a_new_one(
    nats_url: str, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of connections that say nothing, or half of a hello, keeps nobody out."""
    monkeypatch.setattr(tls_listener, "MAX_HANDSHAKES", 4)
    async with tls_gateway(nats_url, authority, max_connections=2) as gateway:
        flood = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(9)]
        for _, writer in flood[::2]:
            writer.write(b"\x16\x03\x01")
        assert (await gateway.request("GET", "/healthz")).status == 200
        assert await flood[0][0].read() == b""
        assert (await outcomes(gateway))["evicted"] >= 5
        for _, writer in flood:
            writer.transport.abort()


def read_until_closed(port: int, context: ssl.SSLContext) -> bytes:
    """The answer to a request that ends its connection, from a client that never ends its TLS."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as encrypted,
    ):
        encrypted.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := encrypted.recv(65_536):
            answer += piece
        with socket.socket(fileno=os.dup(encrypted.fileno())) as below:
            below.settimeout(20)
            with suppress(ConnectionResetError):
                while below.recv(65_536):
                    pass
        return answer


async def test_a_client_that_does_not_close_is_closed(
    nats_url: str, authority: CertificateAuthority
) -> None:
    """uvloop alone would wait for its end of TLS for half a minute, or as long as it is told to."""
    async with tls_gateway(nats_url, authority) as gateway:
        assert gateway.tls
        answer = await asyncio.to_thread(read_until_closed, gateway.port, gateway.tls)
        assert answer.startswith(b"HTTP/1.1 200 ")


def shake_hands(port: int, context: ssl.SSLContext, host: str) -> None:
    """A handshake of a client that says why it ends it, as asyncio's does not."""
    with (
        socket.create_connection(("127.0.0.1", port)) as connection,
        context.wrap_socket(connection, server_hostname=host),
    ):
        pass


@pytest.mark.parametrize("what", ["another authority", "another host"])
async def test_a_client_that_does_not_trust_the_certificate_is_counted(
    nats_url: str, authority: CertificateAuthority, tmp_path: Path, what: str
) -> None:
    """The operator sees in a metric what clients see as an error."""
    another = CertificateAuthority(tmp_path / "another")
    async with tls_gateway(nats_url, authority) as gateway:
        before = await outcomes(gateway)
        trusts = authority if what == "another host" else another
        host = "evil.example" if what == "another host" else "127.0.0.1"
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(shake_hands, gateway.port, trusts.client_context(), host)
        await counts(gateway, "refused_by_client", before)


async def test_an_old_protocol_is_refused(
    nats_url: str, authority: CertificateAuthority, recwarn: pytest.WarningsRecorder
) -> None:
    old = authority.client_context()
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    recwarn.clear()
    async with tls_gateway(nats_url, authority) as gateway:
        before = await outcomes(gateway)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await gateway.with_tls(old).request("GET", "/healthz")
        await counts(gateway, "old_protocol", before)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_new_protocols_are_spoken(
    nats_url: str, authority: CertificateAuthority, version: ssl.TLSVersion
) -> None:
    async with tls_gateway(nats_url, authority) as gateway:
        context = authority.client_context()
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2", "http/1.1"])
        _, writer = await gateway.with_tls(context).connect()
        found = writer.get_extra_info("ssl_object")
        assert found.selected_alpn_protocol() == "http/1.1"
        assert found.version() == version.name.replace("_", ".")
        writer.transport.abort()


async def served_certificate(gateway: RunningGateway) -> bytes:
    _, writer = await gateway.connect()
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(True)
    writer.transport.abort()
    return found


async def test_certificates_are_replaced_while_streams_run(
    nats_url: str, authority: CertificateAuthority
) -> None:
    """New connections get the new one; an open socket, and a stream on it, notice nothing."""
    slow = {"ttft_ms": 1, "itl_ms": 5}
    tls = {**authority.make_server(), "tls": authority.client_context()}
    async with cell(nats_url, mock=slow, **tls) as (gateway,), gateway.socket() as stream:
        old = await served_certificate(gateway)
        await stream.generate("a", max_tokens=400)
        await stream.receive_until("a", "chunk")
        authority.make_server()

        async def is_replaced() -> bool:
            return await served_certificate(gateway) != old

        await eventually(is_replaced)
        assert (await stream.receive_rest("a"))[-1]["finish_reason"] == "length"
        assert (await gateway.complete()).status == 200


async def test_a_broken_certificate_leaves_the_old_one_in_use(
    nats_url: str, authority: CertificateAuthority
) -> None:
    """It is counted, and the next good one is taken."""
    rejected = 'millstream_tls_certificate_reloads_total{outcome="rejected"}'
    not_after = "millstream_tls_certificate_not_after_timestamp_seconds"
    async with tls_gateway(nats_url, authority) as gateway:
        old, expires = await served_certificate(gateway), await gateway.metric(not_after)
        (authority.directory / "server.pem").write_text("-----BEGIN CERTIFICATE-----\n")

        async def is_rejected() -> bool:
            text = (await gateway.request("GET", "/metrics", key=None)).body.decode()
            return rejected in text

        await eventually(is_rejected)
        assert await served_certificate(gateway) == old
        authority.make_server(days=30)

        async def is_renewed() -> bool:
            return await gateway.metric(not_after) > expires

        await eventually(is_renewed)
        assert await served_certificate(gateway) != old


async def test_a_certificate_that_cannot_be_used_stops_the_start(
    authority: CertificateAuthority,
) -> None:
    """Before anything else, so that a typo is found without a broker."""
    settings = GatewaySettings(nats="nats://127.0.0.1:1", **authority.make_server(days=-1))
    with pytest.raises(CertificateUnusable, match="expired"):
        await run(settings, asyncio.Event())


@asynccontextmanager
async def mapped_gateway(
    nats_url: str, authority: CertificateAuthority, **settings: Any
) -> AsyncIterator[RunningGateway]:
    """A gateway that takes certificates of `authority` for the two tenants."""
    settings = {"tenants": MAPPED, "tls_client_ca": authority.file, **settings}
    async with tls_gateway(nats_url, authority, **settings) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("uris", "key", "status", "code"),
    [
        ((ACME,), None, 200, None),
        ((ACME,), KEY, 200, None),
        ((NOBODY,), KEY, 200, None),
        ((), KEY, 200, None),
        ((NOBODY,), None, 401, "invalid_api_key"),
        ((), None, 401, "invalid_api_key"),
        ((ACME,), "sk-wrong", 401, "invalid_api_key"),
        ((ACME,), OTHER_KEY, 403, "forbidden"),
        ((ACME, OTHER), None, 403, "forbidden"),
        ((ACME, OTHER), KEY, 403, "forbidden"),
    ],
)
async def test_a_certificate_stands_for_the_tenant_that_lists_it(
    nats_url: str,
    authority: CertificateAuthority,
    uris: tuple[str, ...],
    key: str | None,
    status: int,
    code: str | None,
) -> None:
    """Over HTTP and in handshakes alike; a key beside it must be of the same tenant."""
    client = authority.client_context("client" if uris else "", *uris)
    async with mapped_gateway(nats_url, authority) as trusted:
        gateway = trusted.with_tls(client)
        answer = await gateway.request("GET", "/v1/models", key=key)
        assert (answer.status, answer.json.get("error", {}).get("code")) == (status, code)
        if status == 200:
            async with gateway.socket(key=key) as opened:
                await opened.send(type="cancel", id="nobody")
                assert (await opened.receive())["code"] == "request_not_found"
        else:
            with pytest.raises(InvalidStatus) as refused:
                async with gateway.socket(key=key):
                    pass
            assert refused.value.response.status_code == status


async def test_a_required_certificate_is_asked_for_in_the_handshake(
    nats_url: str, authority: CertificateAuthority, tmp_path: Path
) -> None:
    """None, one of another authority, and one that has expired: none of them reaches HTTP."""
    stranger = CertificateAuthority(tmp_path / "stranger")
    client = authority.client_context("acme", ACME)
    required: dict[str, Any] = {"tls_client_ca": authority.file, "tls_client_auth": "required"}
    server = authority.make_server()
    async with gateways(nats_url, tls=client, tenants=MAPPED, **server, **required) as (gateway,):
        assert (await gateway.request("GET", "/v1/models", key=None)).status == 200
        refused = {
            "no_client_certificate": authority.client_context(),
            "client_certificate_refused": stranger.client_context(
                "acme", ACME, trusts=authority.file
            ),
        }
        for outcome, context in refused.items():
            before = await outcomes(gateway)
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await gateway.with_tls(context).request("GET", "/v1/models", key=KEY)
            await counts(gateway, outcome, before)
        before = await outcomes(gateway)
        expired = authority.client_context("expired", ACME, days=-1)
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await gateway.with_tls(expired).request("GET", "/v1/models", key=KEY)
        await counts(gateway, "client_certificate_refused", before)


async def test_a_stranger_certificate_is_refused_even_where_none_is_required(
    nats_url: str, authority: CertificateAuthority, tmp_path: Path
) -> None:
    """And its names count for nothing."""
    stranger = CertificateAuthority(tmp_path / "stranger")
    forged = stranger.client_context("acme", ACME, trusts=authority.file)
    async with mapped_gateway(nats_url, authority) as gateway:
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await gateway.with_tls(forged).request("GET", "/v1/models", key=None)


async def test_without_authorities_a_certificate_counts_for_nothing(
    nats_url: str, authority: CertificateAuthority
) -> None:
    client = authority.client_context("acme", ACME)
    async with tls_gateway(nats_url, authority, tenants=MAPPED) as gateway:
        answer = await gateway.with_tls(client).request("GET", "/v1/models", key=None)
        assert answer.status == 401


async def configure(nats_url: str, configured: dict[str, TenantSettings]) -> None:
    async with connect(nats_url, "test") as broker:
        opened = await Tenants.open(broker, declares=always)
        try:
            await opened.apply_config(configured)
        finally:
            await opened.close()


@pytest.mark.parametrize("key", [None, KEY])
async def test_a_certificate_that_is_given_to_another_tenant_closes_open_sockets(
    nats_url: str, authority: CertificateAuthority, key: str | None
) -> None:
    """As a removed key does; whoever has only its key goes on."""
    client = authority.client_context("acme", ACME)
    async with (
        mapped_gateway(nats_url, authority) as gateway,
        gateway.with_tls(client).socket(key=key) as closed,
        gateway.socket(key=KEY) as other,
    ):
        moved = {
            "acme": TenantSettings(keys=(KEY,)),
            "other": TenantSettings(keys=(OTHER_KEY,), certificates=(ACME,)),
        }
        await configure(nats_url, moved)
        with pytest.raises(ConnectionClosed):
            await closed.receive()
        assert closed.connection.close_reason == "key_revoked"
        await other.send(type="cancel", id="nobody")
        assert (await other.receive())["code"] == "request_not_found"


async def test_two_tenants_cannot_list_one_certificate(nats_url: str) -> None:
    """Nothing is written then."""
    twice = {name: TenantSettings(certificates=(ACME,)) for name in ("acme", "other")}
    with pytest.raises(CertificateTaken, match="already stands for"):
        await configure(nats_url, twice)


async def test_a_page_of_another_origin_may_not_use_its_visitors_certificate(
    nats_url: str, authority: CertificateAuthority
) -> None:
    """Browsers show it for any page; a key is only sent by a page that has it."""
    client = authority.client_context("acme", ACME)
    listed = "https://app.example"
    async with mapped_gateway(nats_url, authority, cors_origins=(listed, "*")) as trusted:
        gateway = trusted.with_tls(client)

        async def status(origin: str, key: str | None) -> int:
            headers = {"Origin": origin, "Host": f"127.0.0.1:{gateway.port}"}
            try:
                async with gateway.socket(key=key, headers={"Origin": origin}):
                    over_websocket = 200
            except InvalidStatus as refused:
                over_websocket = refused.response.status_code
            answer = await gateway.request("GET", "/v1/models", key=key, headers=headers)
            assert answer.status == over_websocket
            return answer.status

        assert await status("https://evil.example", None) == 403
        assert await status("https://evil.example", KEY) == 200
        assert await status(listed, None) == 200
        assert await status(gateway.url, None) == 200
