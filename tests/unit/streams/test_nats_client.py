"""The client of our own agrees with nats-py's on every header that a broker sends."""

import asyncio
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client as NatsClient

from streams.broker.nats_client import PatchedNatsClient
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.ports import free_port

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,20}", fullmatch=True)
VALUES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]), max_size=20)


@given(st.dictionaries(NAMES, VALUES))
def test_headers_are_read_as_nats_py_reads_them(headers: dict[str, str]) -> None:
    """The method overrides one of nats-py's; a release that renames it fails here."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    raw = lines.encode() + b"\r\n"
    assert PatchedNatsClient._parse_header_lines(raw) == NatsClient._parse_header_lines(raw)


async def test_a_cancellation_that_was_lost_ends_the_next_try() -> None:
    """A time-out comes once; without it a command would try to connect for ever."""

    async def lose(_: Exception) -> None:
        connecting.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    client = PatchedNatsClient()
    url = f"nats://127.0.0.1:{free_port()}"
    connecting = asyncio.create_task(
        client.connect(url, error_cb=lose, reconnect_time_wait=0, max_reconnect_attempts=-1)
    )
    await asyncio.wait({connecting}, timeout=PATIENCE_SECONDS)
    assert connecting.cancelled()


async def test_a_server_that_has_not_greeted_is_no_older_than_the_last_one() -> None:
    """What is sent meanwhile must not be for servers of long ago."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(b'INFO {"version": "2.15.1", "headers": true, "max_payload": 1000000}\r\n')
        while (await reader.readline()) != b"PING\r\n":
            pass
        writer.write(b"PONG\r\n")
        await writer.drain()
        first.close()
        writer.close()

    async def be_silent(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.read()
        writer.close()

    client = PatchedNatsClient()
    first = await asyncio.start_server(serve, "127.0.0.1", one := free_port())
    async with await asyncio.start_server(be_silent, "127.0.0.1", two := free_port()):
        urls = [f"nats://127.0.0.1:{port}" for port in (one, two)]
        await client.connect(
            urls, dont_randomize=True, reconnect_time_wait=0, connect_timeout=int(PATIENCE_SECONDS)
        )
        await eventually(lambda: client._current_server and client._current_server.uri.port == two)
        assert client.connected_server_version.major == 2
        client.abort()
        await client.close()


async def test_a_flush_does_not_overtake_a_subscription() -> None:
    """When it returns, the server has the subscription, and answers meant for it arrive."""
    received: list[bytes] = []

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(b'INFO {"headers": true, "max_payload": 1000000}\r\n')
        while line := await reader.readline():
            received.append(line.split()[0])
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", port := free_port()):
        client = PatchedNatsClient()
        await client.connect(f"nats://127.0.0.1:{port}")
        await client.subscribe("subject")
        await client.flush(PATIENCE_SECONDS)
        await client.close()
    assert received[:4] == [b"CONNECT", b"PING", b"SUB", b"PING"]
