"""Writes of one turn of the loop leave together, in order, and none is kept for longer."""

import asyncio
from collections.abc import Callable

from starlette.applications import Starlette
from uvicorn.server import ServerState

from gateway.server.http_protocol import ServerConfig
from gateway.server.websocket_protocol import WebSocketProtocol
from gateway.server.write_coalescer import MAX_BUFFERED_BYTES, CoalescingTransport


class Recorder(asyncio.Transport):
    """What the transport behind it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes | str] = []
        self.written: Callable[[], None] = lambda: None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append(bytes(data))
        self.written()

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return bool({"close", "abort"} & set(self.calls))

    def get_write_buffer_size(self) -> int:
        return 100


def gathered() -> tuple[CoalescingTransport, Recorder]:
    behind = Recorder()
    return CoalescingTransport(behind, asyncio.get_running_loop()), behind


async def test_writes_of_one_turn_are_one() -> None:
    transport, behind = gathered()
    for turn in (b"12", b"34"):
        transport.write(turn[:1])
        transport.write(turn[1:])
        await asyncio.sleep(0)
    assert behind.calls == [b"12", b"34"]


async def test_much_is_passed_on_at_once_and_in_order() -> None:
    transport, behind = gathered()
    much = b"m" * MAX_BUFFERED_BYTES
    for data in (b"a", much, b"z"):
        transport.write(data)
    assert behind.calls == [b"a" + much]
    await asyncio.sleep(0)
    assert behind.calls == [b"a" + much, b"z"]


async def test_what_was_written_goes_before_the_close() -> None:
    transport, behind = gathered()
    transport.write(b"goodbye")
    transport.close()
    transport.write(b"too late")
    await asyncio.sleep(0)
    assert behind.calls == [b"goodbye", "close"]


async def test_what_was_written_goes_before_a_client_that_hung_up() -> None:
    """The transport behind closes itself as soon as the protocol has heard of the end."""
    behind = Recorder()
    socket = WebSocketProtocol(ServerConfig(Starlette(), lifespan="off"), ServerState(), {})
    socket.connection_made(behind)
    socket.transport.write(b"goodbye")
    socket.eof_received()
    assert behind.calls == [b"goodbye", "close"]


async def test_an_abort_drops_what_was_written() -> None:
    transport, behind = gathered()
    transport.write(b"unread")
    transport.abort()
    await asyncio.sleep(0)
    assert behind.calls == ["abort"]


async def test_what_is_passed_on_is_counted_once() -> None:
    """`pause_writing` comes from within `write`, and judges by it whether a client reads."""
    transport, behind = gathered()
    sizes = []
    behind.written = lambda: sizes.append(transport.get_write_buffer_size())
    transport.write(b"12345")
    await asyncio.sleep(0)
    assert sizes == [100]


async def test_what_is_gathered_counts_as_not_sent() -> None:
    transport, _ = gathered()
    transport.write(b"12345")
    assert transport.get_write_buffer_size() == 105
    await asyncio.sleep(0)
    assert transport.get_write_buffer_size() == 100
