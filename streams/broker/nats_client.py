"""nats-py's client with a faster read and write path, and with working cancellation.

A subscription may be raw: its handler is called from the read loop with the bytes as they came,
where nats-py parses all headers, builds a message and passes it through a queue to a task. The
subscription that carries every token is raw; nats-py's way took a third of a gateway's work on a
token.

A message is published at once where nothing has to be waited for, and what comes in is parsed by
`streams/broker/nats_wire.py`.

nats-py waits with `asyncio.wait_for`, which in Python 3.11 loses a cancellation that comes as it
ends; the task would then run on for ever. And a cancelled flush would close the whole connection
when its answer comes.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.aio.client import DEFAULT_FLUSH_TIMEOUT, NO_RESPONDERS_STATUS, ServerVersion, Srv
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.js.api import Header

from streams.broker.authentication import Authentication, Identity, sign
from streams.broker.countdown import running_timeout
from streams.broker.nats_wire import RawHandler, WireParser, encode_publish, parse_header_lines
from streams.connection_files import NO_FILES

_NEVER = 86_400  # seconds: our own time-outs come first, and know when the process stood still


class PatchedNatsClient(NatsClient):
    """nats-py's client with a faster read and write path, whose calls can be cancelled safely."""

    def __init__(self, authentication: Authentication | None = None) -> None:
        super().__init__()
        self._authentication = authentication or Authentication(NO_FILES)
        self.identity: Identity | None = None  # shown at the last connect or reconnect
        self._raw_handlers: dict[int, RawHandler] = {}
        self._questions: set[_Question] = set()  # of `request`, whose answers are awaited
        self._ps = WireParser(self, self._raw_handlers)

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """The certificates for the next TLS handshake, read anew. Raises `UnusableFile`."""
        return self._authentication.ssl_context()

    @property
    def connected_server_version(self) -> ServerVersion:
        """The version of the server of now, or of the last one.

        nats-py knows none while it tries a server for the first time, and would have a consumer
        made by a call for servers before 2.9, to which no user has a right.
        """
        return ServerVersion(self._server_info.get("version", "0.0.0"))

    def sign_nonce(self, nonce: str) -> bytes:
        """Read the identity for one connect, and sign the server's nonce (`signature_cb`).

        Raises `UnusableFile`.
        """
        self.identity = self._authentication.identity()
        self._public_nkey = self.identity.key.public
        return sign(self.identity, nonce)

    def user_jwt(self) -> bytes:
        """Return the token of the identity that has just signed (`user_jwt_cb`)."""
        assert self.identity, "nats-py has the nonce signed first"
        assert self.identity.token, "an identity from a credentials file"
        return self.identity.token.encode()

    def try_publish_now(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str
    ) -> bool:
        """Publish if that needs no waiting; return whether the connection took the message.

        False means that nothing was sent and the caller must use `publish`: there is no connection,
        the send buffer is full, or nats-py would refuse the message.
        """
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
        """Return whether a payload of `size` bytes fits the send buffer of a live connection."""
        if self._status != self.CONNECTED or self._flusher_task is None:
            return False
        has_room = self._pending_data_size + size < self._max_pending_size
        return has_room and size <= self._max_payload and not self._flusher_task.done()

    async def subscribe_raw(self, subject: str, handler: RawHandler) -> Subscription:
        """Subscribe with a handler that gets each message as bytes, without parsed headers.

        The read loop calls `handler` before it reads the next message, so it must neither block nor
        raise.
        """
        subscription = await self.subscribe(subject, cb=_fail_if_called)
        self._raw_handlers[subscription._id] = handler
        return subscription

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._raw_handlers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    def abort(self) -> None:
        """Drop the TCP connection at once; what the server has not yet received is lost."""
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer:
            self._transport._io_writer.transport.abort()

    async def abandon(self) -> None:
        """Close the client at once; messages that the server has not yet received are lost.

        nats-py's `close` would wait until the server has received them.
        """
        self._pending, self._pending_data_size = [], 0
        self.abort()
        await self.close()

    async def _connect_to_server(self, s: Srv) -> None:
        """Close the last socket first: nats-py leaks that of a server that did not greet.

        A task whose cancellation nats-py has lost in the try before ends here, where nats-py would
        try for ever.
        """
        self.abort()
        task = asyncio.current_task()
        if task and task.cancelling():
            raise asyncio.CancelledError
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        """Leave no half-made connection: after a failed handshake, nats-py waits for its end."""
        try:
            await super()._process_connect_init()
        except BaseException:
            self.abort()
            self._transport = None
            raise

    async def _attempt_reconnect(self) -> None:
        """Drop the old connection first: nats-py would wait for a silent server to read it all."""
        self.abort()
        await super()._attempt_reconnect()

    async def flush(self, timeout: float = DEFAULT_FLUSH_TIMEOUT) -> None:
        """Wait as nats-py's `flush` until the server has received all; never lose a cancellation.

        Raises TimeoutError when the loop has run for `timeout` seconds. If the task is cancelled
        meanwhile, CancelledError is raised in any case.
        """
        with _reraise_cancellation():
            async with running_timeout(timeout):
                await super().flush(_NEVER)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Send a request and return the reply, as nats-py's `request`; never lose a cancellation.

        Raises TimeoutError when the loop has run for `timeout` seconds, and at once the error that
        `refuse` is called with meanwhile. If the task is cancelled, CancelledError is raised in any
        case.
        """
        with _reraise_cancellation():
            async with running_timeout(timeout), self._refusable(subject):
                return await super().request(subject, payload, _NEVER, old_style, headers)

    @asynccontextmanager
    async def _refusable(self, subject: str) -> AsyncIterator[None]:
        """Raise the refusal of a question on `subject` if it comes before the code inside ends."""
        question = _Question(subject, asyncio.timeout(None))
        self._questions.add(question)
        try:
            async with question.limit:
                yield
        except TimeoutError:
            if question.refusal:
                raise question.refusal from None
            raise
        finally:
            self._questions.discard(question)

    def refuse(self, asked: str, error: Callable[[str], Exception]) -> None:
        """End the requests that wait for an answer on a subject, in lower case, with its error."""
        for question in self._questions:
            if question.subject.lower() == asked and question.refusal is None:
                question.refusal = error(question.subject)
                question.limit.reschedule(0)

    async def _request_old_style(self, subject: str, payload: bytes, timeout: float = 1) -> Msg:
        """Ask with an inbox for this request alone, which is given up however the request ends.

        nats-py's own would keep the subscription if the request is cancelled.
        """
        inbox, reply = self.new_inbox(), asyncio.get_running_loop().create_future()
        subscription = await self.subscribe(inbox, future=reply, max_msgs=1)
        try:
            await subscription.unsubscribe(limit=1)
            await self.publish(subject, payload, reply=inbox)
            msg: Msg = await reply
        except BaseException:
            with suppress(nats.errors.Error):  # it has ended by itself, or with its client
                await subscription.unsubscribe()
            raise
        if msg.headers and msg.headers.get(Header.STATUS) == NO_RESPONDERS_STATUS:
            raise nats.errors.NoRespondersError
        return msg

    async def _send_ping(self, future: "asyncio.Future[bool] | None" = None) -> None:
        """Write first what is buffered: nats-py's ping overtakes it, and tells too early of it."""
        if self.is_connected and self._transport and self._pending:
            self._transport.writelines(self._pending)
            self._pending, self._pending_data_size = [], 0
        await super()._send_ping(future)

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():  # its flush was cancelled
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        return parse_header_lines(raw)


@dataclass(eq=False)
class _Question:
    """A request that waits for its answer; ending `limit` ends the wait."""

    subject: str
    limit: asyncio.Timeout
    refusal: Exception | None = None


async def _fail_if_called(msg: Msg) -> None:
    """Stand in for the handler that nats-py demands; raw subscriptions never use its queue."""
    raise AssertionError(msg.subject)


@contextmanager
def _reraise_cancellation() -> Iterator[None]:
    """Raise CancelledError at the end if the code inside has swallowed a cancellation."""
    task = asyncio.current_task()
    assert task
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
