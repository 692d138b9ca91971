"""What a process asks of its brokers, over one connection that outlives them.

`store` is the durable publish: it returns when the broker has stored the message, fails with an
error of ours otherwise, and may be pipelined. `read` is the way back.
"""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import nats.errors
import orjson
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from streams import topology
from streams.broker import clock_sync
from streams.broker.cluster_clock import ClockSample, ClusterClock
from streams.broker.inbox import Inbox
from streams.broker.reconnecting_client import ReconnectingClient
from streams.broker.responses import (
    MessagePage,
    PendingClockSample,
    PendingPubAck,
    PendingRead,
    PendingResponse,
    PubAck,
    StoredMessage,
    StoreRefused,
)
from streams.broker.subscription import BrokerSubscription, MessageHandler
from streams.errors import BrokerUnavailable, NotConnected

__all__ = [
    "Broker",
    "BrokerSubscription",
    "MessageHandler",
    "PubAck",
    "StoreRefused",
    "StoredMessage",
    "connect",
]

T = TypeVar("T")

STORE_SECONDS = 2.5
_RETRY_SECONDS = 0.25
_READ_SECONDS = (0.2, 0.3, 0.4, 0.6, 1.0)  # for the tries of a read: STORE_SECONDS together
_PAGE_LIMITS: Mapping[str, int | str] = {
    "batch": 1000,
    "max_bytes": 1_000_000,
}  # whole in such a try
_NOT_DELETED, _NO_MESSAGE = 10057, 10037
_CLOCK_SUBJECT = f"$JS.API.STREAM.INFO.{topology.REQUESTS}"


class Broker(ReconnectingClient):
    """The connection of one process, and its time. Use `async with connect(...)`."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url, name)
        self.clock = ClusterClock()
        self._inbox = Inbox(STORE_SECONDS)
        self._subscriptions.append(
            BrokerSubscription(self, self._inbox.subject, direct=self._inbox.receive)
        )
        self.on_disconnect.append(self._fail_pending)

    @property
    def js(self) -> JetStreamContext:
        """JetStream's management API; do not keep it."""
        return self._client.jetstream(timeout=STORE_SECONDS)

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        headers: dict[str, str] | None = None,
        reply: str = "",
    ) -> None:
        """Publish at most once; raises `BrokerUnavailable` when not even that is possible."""
        if self._client.try_publish_now(subject, payload, headers, reply):
            return
        task = asyncio.current_task()
        assert task
        cancels = task.cancelling()
        try:
            await self._client.publish(subject, payload, reply=reply, headers=headers)
        except (nats.errors.Error, OSError) as error:
            raise BrokerUnavailable(f"not published to {subject}: {error!r}") from error
        if task.cancelling() > cancels:  # nats-py swallows it while its buffer is full
            raise asyncio.CancelledError

    async def request(
        self, subject: str, payload: bytes = b"", seconds: float = 1.0
    ) -> bytes | None:
        """One answer, or None when nobody answers in time."""
        try:
            reply = await self._client.request(subject, payload, timeout=seconds)
        except (nats.errors.Error, TimeoutError, OSError):
            return None
        return reply.data

    async def store(
        self,
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None = None,
        *,
        repeats: bool = False,
    ) -> PubAck:
        """Publish and wait until the broker has stored it.

        Raises `StoreRefused` with the broker's reason, or `BrokerUnavailable` when it did not
        answer within `STORE_SECONDS`: then the message may or may not have been stored. Cancelling
        it leaves that open too. With `repeats`, where that is harmless, it is sent again meanwhile:
        a leader that dies takes along what was on its way.
        """
        answer = PendingPubAck()
        stored = await self._await_response(answer, subject, payload, headers, repeats=repeats)
        return replace(stored, repeated=True) if answer.repeated else stored

    async def store_retrying(
        self, subject: str, payload: bytes, headers: dict[str, str], seconds: float
    ) -> PubAck:
        """`store` again and again while the broker does not answer.

        For messages whose repetition is harmless, as with a `Nats-Msg-Id` or an expected sequence.
        """
        deadline = time.monotonic() + seconds
        unsure = ""  # why it is not known of some try whether it was stored
        while True:
            try:
                stored = await self.store(subject, payload, headers, repeats=True)
                return replace(stored, repeated=True) if unsure else stored
            except BrokerUnavailable as error:
                if not isinstance(error, NotConnected):
                    unsure = str(error)  # not the error, which holds this frame: a cycle
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise BrokerUnavailable(unsure) if unsure else error from None
                await asyncio.sleep(_RETRY_SECONDS)

    async def get(self, stream: str, seq: int) -> StoredMessage | None:
        """One message by its sequence; None when it is gone for sure.

        Any replica answers a direct get, and one may lag behind: only the leader's no is a no.
        """
        found = await self.read(stream, {"seq": seq})
        return found[0] if found else await self._get_from_leader(stream, seq)

    async def remove(self, stream: str, seq: int) -> bool:
        """Delete a message; False when it is not there. Raises `BrokerUnavailable`."""
        try:
            await self.js.delete_msg(stream, seq)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            refused = isinstance(error, APIError) and error.err_code == _NOT_DELETED
            if refused and await self.get(stream, seq) is None:  # the code has other reasons too
                return False
            raise BrokerUnavailable(f"{stream} {seq} is not deleted: {error!r}") from error
        return True

    async def purge(self, stream: str, subject: str, before: int) -> None:
        """Delete a subject's messages before a sequence. Raises `BrokerUnavailable`."""
        try:
            await self.js.purge_stream(stream, seq=before, subject=subject)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise BrokerUnavailable(f"{subject} is not purged: {error!r}") from error

    async def _get_from_leader(self, stream: str, seq: int) -> StoredMessage | None:
        query = orjson.dumps({"seq": seq})
        answer = await self.request(f"$JS.API.STREAM.MSG.GET.{stream}", query, STORE_SECONDS)
        if answer is None:
            raise BrokerUnavailable(f"no answer when reading {stream}")
        found = orjson.loads(answer)
        if error := found.get("error"):
            if error.get("err_code") == _NO_MESSAGE:
                return None
            raise BrokerUnavailable(f"{stream} {seq} is not read: {error}")
        message = found["message"]
        headers = await self._client._process_headers(base64.b64decode(message.get("hdrs", "")))
        data = base64.b64decode(message.get("data", ""))
        return StoredMessage(message["seq"], message["subject"], data, headers or {})

    async def read_subject(self, stream: str, subject: str, after: int = 0) -> list[StoredMessage]:
        """All messages on a subject (or filter) behind sequence `after`, oldest first."""
        found: list[StoredMessage] = []
        while True:
            page = await self.read_page(
                stream, {**_PAGE_LIMITS, "next_by_subj": subject, "seq": after + 1}
            )
            found += page.messages
            if not page.remaining or not page.messages:
                return found
            after = page.messages[-1].seq

    async def find_subject(self, stream: str, pattern: str) -> str | None:
        """The subject of the last message that matches; None if there is none.

        To read on by a pattern the broker goes through all messages from there to the end of the
        stream, and stores none meanwhile: 30 ms where 1,000 subjects have 120,000. The last one it
        finds by the subjects, in 0.1 ms.
        """
        found = await self.read(stream, {"last_by_subj": pattern})
        return found[0].subject if found else None

    async def read(self, stream: str, query: Mapping[str, int | str]) -> list[StoredMessage]:
        """A direct get (ADR-31), single or batched; raises `BrokerUnavailable` after a silence.

        What is not there is not found: the list is empty.
        """
        return (await self.read_page(stream, query)).messages

    async def read_page(self, stream: str, query: Mapping[str, int | str]) -> MessagePage:
        """`read`, and how much more there is: any replica answers.

        The broker chooses which, so one that is frozen is not waited for.
        """
        subject, payload = f"$JS.API.DIRECT.GET.{stream}", orjson.dumps(dict(query))
        for seconds in _READ_SECONDS:
            try:
                async with asyncio.timeout(seconds):
                    return await self._await_response(
                        PendingRead("batch" in query), subject, payload
                    )
            except TimeoutError:
                continue
        raise BrokerUnavailable(f"NATS did not answer in {sum(_READ_SECONDS):g} s")

    async def call_api(self, ask: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        """The answer to a question, which `ask` puts to the management API that it is given.

        Only leaders answer: while one is elected it is put again and again. Raises nats-py's
        `NotFoundError`, or `BrokerUnavailable` for any other answer and after a silence.
        """
        for seconds in _READ_SECONDS:
            try:
                return await ask(self._client.jetstream(timeout=seconds))
            except NotFoundError:
                raise
            except TimeoutError:
                continue
            except ServiceUnavailableError:  # told at once
                await asyncio.sleep(seconds)
            except (nats.errors.Error, OSError) as error:
                raise BrokerUnavailable(f"not told by NATS: {error!r}") from error
        raise BrokerUnavailable(f"NATS did not answer in {sum(_READ_SECONDS):g} s")

    async def sample_clock(self) -> ClockSample:
        """What time it is for the leader of the requests; raises `BrokerUnavailable`."""
        return await self._await_response(PendingClockSample(), _CLOCK_SUBJECT, b"")

    async def _await_response(
        self,
        answer: PendingResponse[T],
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None = None,
        *,
        repeats: bool = False,
    ) -> T:
        """Publish something that the broker answers, and wait for the answer.

        With `repeats` it is published again and again meanwhile.
        """
        if not self._client.is_connected:
            raise NotConnected(f"not connected to NATS at {self.url}")
        reply = self._inbox.expect(answer)
        if repeats:
            answer.resend = partial(self._client.try_publish_now, subject, payload, headers, reply)
        try:
            if not self._client.try_publish_now(subject, payload, headers, reply):
                await self._publish_in_time(subject, payload, headers, reply)
            return await answer.future
        finally:
            self._inbox.discard(reply)
            answer.close()

    async def _publish_in_time(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, reply: str
    ) -> None:
        try:
            async with asyncio.timeout(STORE_SECONDS):
                await self.publish(subject, payload, headers, reply)
        except TimeoutError:
            raise BrokerUnavailable(f"NATS took nothing for {STORE_SECONDS:g} s") from None

    def _fail_pending(self) -> None:
        self._inbox.fail(BrokerUnavailable("the connection to NATS was lost"))


@asynccontextmanager
async def connect(url: str, name: str) -> AsyncIterator[Broker]:
    """A connected `Broker` with its housekeeping running; closed at the end."""
    broker = Broker(url, name)
    await broker.open()
    works = (broker.run(), clock_sync.keep_synced(broker))
    housekeeping = [asyncio.create_task(work, name="broker") for work in works]
    try:
        yield broker
    finally:
        for task in housekeeping:
            task.cancel()
        await broker.close()
