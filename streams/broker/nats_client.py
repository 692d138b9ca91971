"""nats-py's client with leaner ways in and out, and without its deafness to cancellation.

A subscription may be direct: its handler is called from the read loop with the bytes as they came,
where nats-py parses all headers, builds a message and passes it through a queue to a task. The
subscription that carries every token is one; a third of a gateway's work on a token went there.

What is published goes out at once where nothing has to be waited for, and what comes in is parsed
by `streams/broker/nats_wire.py`.

It waits with `asyncio.wait_for`, which in Python 3.11 loses a cancellation that comes as it ends;
the task would then run on for ever. And a cancelled flush would close the whole connection when its
answer comes.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nats.aio.client import Client as NatsClient
from nats.aio.client import Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from streams.broker.nats_wire import RawHandler, WireParser, encode_publish, parse_header_lines


class PatchedNatsClient(NatsClient):
    """Reads and writes messages in fewer steps; can be cancelled at any time."""

    def __init__(self) -> None:
        super().__init__()
        self._raw_handlers: dict[int, RawHandler] = {}
        self._ps = WireParser(self, self._raw_handlers)

    def try_publish_now(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str
    ) -> bool:
        """Publish now, if nothing is to be waited for or to be refused; else `publish` does it."""
        if not self._can_write_now(len(payload)):
            return False
        command = encode_publish(subject, payload, headers, reply)
        if command is None:
            return False
        self._pending.append(command)
        self._pending_data_size += len(command)
        self._flush_soon()
        return True

    def _flush_soon(self) -> None:
        assert self._flush_queue, "it is connected"
        if self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    def _can_write_now(self, size: int) -> bool:
        """Whether a payload can be written right behind what was published before."""
        if self._status != self.CONNECTED or self._flusher_task is None:
            return False
        has_room = self._pending_data_size + size < self._max_pending_size
        return has_room and size <= self._max_payload and not self._flusher_task.done()

    async def subscribe_raw(self, subject: str, handler: RawHandler) -> Subscription:
        """Subscribe with a handler that is called before the next message is read."""
        subscription = await self.subscribe(subject, cb=_fail_if_called)
        self._raw_handlers[subscription._id] = handler
        return subscription

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._raw_handlers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    def abort(self) -> None:
        """Drop the connection at once, with what the server has not taken."""
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer:
            self._transport._io_writer.transport.abort()

    async def abandon(self) -> None:
        """Close at once; nats-py would wait for the server to take what was published."""
        self._pending, self._pending_data_size = [], 0
        self.abort()
        await self.close()

    async def _connect_to_server(self, s: Srv) -> None:
        """nats-py forgets the socket of a server that did not greet, instead of closing it."""
        self.abort()
        await super()._connect_to_server(s)

    async def _attempt_reconnect(self) -> None:
        """nats-py would first wait until a server that has fallen silent takes what was written."""
        self.abort()
        await super()._attempt_reconnect()

    async def flush(self, *args: Any, **options: Any) -> None:
        with _reraise_cancellation():
            await super().flush(*args, **options)

    async def request(self, *args: Any, **options: Any) -> Msg:
        with _reraise_cancellation():
            return await super().request(*args, **options)

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():  # nobody waits for this one any more
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        return parse_header_lines(raw)


async def _fail_if_called(msg: Msg) -> None:
    """nats-py wants a handler for its queue, to which a direct subscription's messages never go."""
    raise AssertionError(msg.subject)


@contextmanager
def _reraise_cancellation() -> Iterator[None]:
    """Raises the cancellation that what is inside has swallowed."""
    task = asyncio.current_task()
    assert task
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
