"""Our reading and writing of NATS's protocol agrees with nats-py's, however the bytes are cut."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.protocol import command
from nats.protocol.parser import Parser as NatsParser

from streams.broker.nats_wire import WireParser, encode_publish, parse_headers

SUBJECTS = st.from_regex(r"[a-z0-9_]{1,8}(\.[a-z0-9_]{1,8}){0,3}", fullmatch=True)
REPLIES = st.one_of(st.just(""), SUBJECTS)
PAYLOADS = st.one_of(st.binary(max_size=40), st.just(b"a\r\nMSG b 1 5\r\nPING\r\n"))
BLOCKS = st.sampled_from([b"", b"NATS/1.0 503\r\n\r\n", b"NATS/1.0\r\nA: 1\r\nBee: two\r\n\r\n"])


class Heard:
    """What a parser tells its client."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    async def _process_msg(self, *message: Any) -> None:
        sid, subject, reply, data, headers = message
        self.said.append((sid, bytes(subject), bytes(reply), data, headers or b""))

    def directly(self, subject: bytes, data: bytes, headers: bytes) -> None:
        self.said.append((7, subject, b"", data, headers))

    def failing(self, subject: bytes, data: bytes, headers: bytes) -> None:
        raise ZeroDivisionError(subject)

    async def _error_cb(self, error: Exception) -> None:
        self.said.append(type(error))

    async def _process_ping(self) -> None:
        self.said.append("ping")

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.said.append(info)


def message(subject: str, reply: str, payload: bytes, block: bytes) -> bytes:
    words = [subject, "7", *([reply] if reply else [])]
    sizes = [len(block), len(block) + len(payload)] if block else [len(payload)]
    line = " ".join(["HMSG" if block else "MSG", *words, *map(str, sizes)])
    return line.encode() + b"\r\n" + block + payload + b"\r\n"


LINES = st.one_of(
    st.builds(message, SUBJECTS, REPLIES, PAYLOADS, BLOCKS),
    st.sampled_from([b"PING\r\n", b"+OK\r\n", b'INFO {"server_id":"x"}\r\n']),
)


def heard(make: Callable[[Heard], NatsParser], pieces: list[bytes]) -> list[Any]:
    async def read() -> list[Any]:
        client = Heard()
        reading = make(client)
        for piece in pieces:
            await reading.parse(piece)
        return client.said

    return asyncio.run(read())


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places})
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


@given(st.lists(LINES, max_size=6), st.lists(st.integers(min_value=0), max_size=5))
def test_whatever_arrives_is_heard_as_nats_py_hears_it(lines: list[bytes], at: list[int]) -> None:
    """TCP cuts where it likes; nats-py's parser gets everything at once, which it can do."""
    whole = b"".join(lines)
    pieces = cut(whole, at)
    said = heard(NatsParser, [whole])
    assert heard(lambda client: WireParser(client, {}), pieces) == said
    without_replies = [(*each[:2], b"", *each[3:]) if len(each) == 5 else each for each in said]
    assert heard(lambda client: WireParser(client, {7: client.directly}), pieces) == without_replies


def test_a_handler_that_fails_does_not_end_the_reading() -> None:
    """It is a fault of ours, and the connection has other subscriptions."""
    lines = [message("a", "", b"1", b""), b"PING\r\n"]
    said = heard(lambda client: WireParser(client, {7: client.failing}), [b"".join(lines)])
    assert said == [ZeroDivisionError, "ping"]


@given(SUBJECTS, REPLIES, PAYLOADS)
def test_a_message_is_written_as_nats_py_writes_it(subject: str, reply: str, data: bytes) -> None:
    assert encode_publish(subject, data, None, reply) == command.pub_cmd(subject, reply, data)
    block = "NATS/1.0\r\nA: 1\r\nName: ä\r\n\r\n".encode()
    written = encode_publish(subject, data, {"A": "1", "Name": "ä"}, reply)
    assert written == command.hpub_cmd(subject, reply, block, data)


@pytest.mark.parametrize(
    ("subject", "reply", "value"),
    [
        ("a b", "", "1"),
        ("a", "b\r\nPING", "1"),
        ("a", "", "1\r\nB: 2"),
        ("", "", "1"),
        ("a\t", "", ""),
    ],
)
def test_what_would_be_read_as_something_else_is_not_written(
    subject: str, reply: str, value: str
) -> None:
    """nats-py then refuses it, or cleans it, by its own rules."""
    assert encode_publish(subject, b"x", {"A": value}, reply) is None


def test_a_status_is_a_header() -> None:
    """The broker speaks for itself in the version's line (ADR-4)."""
    assert parse_headers(b"NATS/1.0 503\r\n\r\n") == {"Status": "503"}
    assert parse_headers(b"NATS/1.0 404 No Messages\r\nA: 1\r\n\r\n") == {"Status": "404", "A": "1"}
    assert parse_headers(b"NATS/1.0\r\nA: 1\r\n\r\n") == {"A": "1"}


def test_nobody_but_the_broker_speaks_for_it() -> None:
    """A stored message with such a header would end a page of messages, or a pull."""
    assert parse_headers(b"NATS/1.0\r\nStatus: 204\r\nA: 1\r\n\r\n") == {"A": "1"}
    assert parse_headers(b"NATS/1.0 404\r\nStatus: 204\r\n\r\n") == {"Status": "404"}
