"""A process's connection to the broker: publish, store, read and request, across reconnects.

`store` is the durable publish: it returns when the broker has stored the message, fails with an
error of ours otherwise, and may be pipelined. `read` gets stored messages back.
"""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import nats.errors
import orjson
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from streams import subjects, topology
from streams.accounts.access import UserClass, api_subject, tenant_state_subject
from streams.broker import clock_sync
from streams.broker.cluster_clock import ClockSample, ClusterClock
from streams.broker.countdown import Countdown, running_timeout
from streams.broker.inbox import STORE_SECONDS
from streams.broker.reconnecting_client import ReconnectingClient
from streams.broker.reconnecting_subscription import BrokerSubscription, MessageHandler
from streams.broker.responses import (
    MessagePage,
    PendingClockSample,
    PendingPubAck,
    PendingRead,
    PendingResponse,
    PubAck,
    StoredMessage,
    StoreRefused,
    StreamMissing,
)
from streams.broker.store_api import StoreApi
from streams.connection_files import NO_FILES, ConnectionFiles
from streams.errors import BrokerMisconfigured, BrokerUnavailable, NotConnected, NotPermitted

__all__ = [
    "STORE_SECONDS",
    "Broker",
    "BrokerSubscription",
    "MessageHandler",
    "PubAck",
    "StoreRefused",
    "StoredMessage",
    "StreamMissing",
    "connect",
]

T = TypeVar("T")

MIN_MAX_PAYLOAD = 65_536  # bytes: the least for a heartbeat or a checkpoint of a busy cell
_RETRY_SECONDS = 0.25
_DECLARE_SECONDS = 1.0
_READ_SECONDS = (0.2, 0.3, 0.4, 0.6, 1.0)  # timeouts of a read's tries: STORE_SECONDS together
# A page of this size arrives within one such try.
_PAGE_MESSAGES = 1000
_PAGE_LIMITS: Mapping[str, int | str] = {"max_bytes": 1_000_000}
_CATCHUP_READS, _CATCHUP_SECONDS = 20, 0.05  # until a replica has what the leader has
NO_STREAM = 10059  # JetStream's error code
_NOT_DELETED, _NO_MESSAGE = 10057, 10037
_NO_JETSTREAM = frozenset({10039, 10076})  # not for this account, not on any server


class Broker(ReconnectingClient):
    """Connection of one process to the broker (a NATS server or cluster), with its cluster clock.

    Use `async with connect(...)` to make one; it stays usable over reconnects.
    """

    def __init__(self, url: str, name: str, files: ConnectionFiles = NO_FILES) -> None:
        super().__init__(url, name, files)
        self.clock = ClusterClock()
        self._next_declare_request_at = 0.0  # monotonic seconds

    @property
    def js(self) -> JetStreamContext:
        """JetStream's management API on the current connection.

        Get it again for each use, since a reconnect may replace the connection.
        """
        return self._jetstream(STORE_SECONDS)

    def _jetstream(self, seconds: float) -> JetStreamContext:
        return StoreApi(self._client, self._user_class, seconds)

    @property
    def _user_class(self) -> UserClass | None:
        identity = self._client.identity
        return identity.user_class if identity else None

    @property
    def has_accounts(self) -> bool:
        """True if the servers know this process as a user of one of the classes."""
        return self._user_class is not None

    def api_subject(self, call: str) -> str:
        """Return the subject on which this process asks the JetStream API for a call.

        A call is such as `STREAM.INFO.WORK`.
        """
        return api_subject(self._user_class, call)

    async def read_tenant_stream(self, stream: str, subject: str) -> dict[str, Any] | None:
        """Return the state of a stream of one tenant, as JetStream tells it; None if there is none.

        Its `subjects` counts the messages on those that match the filter `subject`. Raises
        `BrokerUnavailable` if no answer comes.
        """
        question = orjson.dumps({"subjects_filter": subject})
        asked = tenant_state_subject(self._user_class, stream)
        answer = await self.request(asked, question, STORE_SECONDS)
        if answer is None:
            raise BrokerUnavailable(f"no answer when asking for the state of {stream}")
        found = orjson.loads(answer)
        if error := found.get("error"):
            if error.get("err_code") == NO_STREAM:
                return None
            raise BrokerUnavailable(f"the state of {stream} is not known: {error}")
        state: dict[str, Any] = found["state"] | {"max_bytes": found["config"]["max_bytes"]}
        return state

    @property
    def max_payload(self) -> int:
        """The broker's limit for a message's headers and payload together, in bytes."""
        return self._client.max_payload

    async def check_usable(self) -> None:
        """Raise `BrokerMisconfigured` if NATS can never serve as it is configured.

        JetStream must be there, and `max_payload` large enough.
        """
        if self.max_payload < MIN_MAX_PAYLOAD:
            raise BrokerMisconfigured(
                f"NATS at {self.url} has a max_payload of {self.max_payload} bytes: set it to "
                f"1MB, or to {MIN_MAX_PAYLOAD} at least"
            )
        for seconds in _READ_SECONDS:
            if not await self._is_without_jetstream():
                return
            if not self._user_class:
                break
            await asyncio.sleep(seconds)  # one that has just started may not have all accounts yet
        raise BrokerMisconfigured(
            f"NATS at {self.url} has JetStream disabled: start nats-server with --jetstream, or "
            "with a `jetstream` block in its configuration, and enable it for this account"
        )

    async def _is_without_jetstream(self) -> bool:
        """Ask once; False if there is no answer, so that the first call tells."""
        try:
            answer = await self._client.request("$JS.API.INFO", timeout=STORE_SECONDS)
        except nats.errors.NoRespondersError:
            return True
        except (nats.errors.Error, TimeoutError, OSError, NotPermitted):
            return False
        return orjson.loads(answer.data).get("error", {}).get("err_code") in _NO_JETSTREAM

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        headers: dict[str, str] | None = None,
        reply: str = "",
    ) -> None:
        """Publish without confirmation: the message arrives once or never.

        Returns at once, except while the connection's send buffer is full. Raises
        `BrokerUnavailable` if the message cannot even be handed to the connection.
        """
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
        """Ask whoever listens on `subject`; return the payload of the first reply.

        Returns None if nobody listens, if no reply comes within `seconds`, if this user may not ask
        (which is logged), or if the connection fails; raises nothing.
        """
        try:
            reply = await self._client.request(subject, payload, timeout=seconds)
        except (nats.errors.Error, TimeoutError, OSError, NotPermitted):
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
        """Publish a message and wait until the broker has stored it; return the confirmation.

        Raises `StoreRefused` with the broker's reason, or `BrokerUnavailable` if no answer comes
        within `STORE_SECONDS`; the message may or may not have been stored then, as after a
        cancellation. `NotConnected` and `NotPermitted`, which comes at once, mean that nothing was
        sent. With `repeats`, for messages whose
        repetition is harmless, the message is sent again while no answer comes: a leader that dies
        loses the messages that were on their way.
        """
        response = PendingPubAck()
        stored = await self._await_response(response, subject, payload, headers, repeats=repeats)
        return replace(stored, repeated=True) if response.repeated else stored

    async def store_retrying(
        self, subject: str, payload: bytes, headers: dict[str, str], seconds: float
    ) -> PubAck:
        """Call `store` until the broker answers, for about `seconds`; return the confirmation.

        Use this only for messages whose repetition is harmless, as with a `Nats-Msg-Id` or an
        expected sequence. Raises `StoreRefused` if the broker refuses, `NotPermitted` if this user
        may not publish there, and `BrokerUnavailable` when time is up. That is a `NotConnected`
        only if the message cannot have been stored by any try.
        """
        unsure = ""  # the reason of a try that may have been stored
        with closing(Countdown(seconds)) as limit:
            while True:
                try:
                    stored = await self.store(subject, payload, headers, repeats=True)
                    return replace(stored, repeated=True) if unsure else stored
                except BrokerUnavailable as error:
                    if error.may_have_succeeded:
                        unsure = str(error)  # not the error, which holds this frame: a cycle
                    if limit.seconds_left < _RETRY_SECONDS or isinstance(error, NotPermitted):
                        raise BrokerUnavailable(unsure) if unsure else error from None
                    await asyncio.sleep(_RETRY_SECONDS)

    async def get(self, stream: str, seq: int) -> StoredMessage | None:
        """Return the message with sequence `seq` in a stream; None if it certainly does not exist.

        Any replica answers a direct get and may lag behind, so the leader is asked for a message
        that a replica does not find. Raises `BrokerUnavailable` if no answer comes.
        """
        found = await self.read(stream, {"seq": seq})
        return found[0] if found else await self.read_from_leader(stream, {"seq": seq})

    async def remove(self, stream: str, seq: int) -> bool:
        """Delete the message with sequence `seq`; return False if it does not exist, else True.

        Raises `BrokerUnavailable` if the broker does not answer or does not delete an existing
        message.
        """
        try:
            await self.js.delete_msg(stream, seq)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            refused = isinstance(error, APIError) and error.err_code == _NOT_DELETED
            if refused and await self.get(stream, seq) is None:  # the code has other reasons too
                return False
            raise BrokerUnavailable(f"{stream} {seq} is not deleted: {error!r}") from error
        return True

    async def purge(self, stream: str, subject: str | None, before: int) -> None:
        """Delete a subject's messages whose stream sequence is less than `before`; None: of all.

        Raises `BrokerUnavailable` if the broker does not answer or refuses.
        """
        try:
            await self.js.purge_stream(stream, seq=before, subject=subject)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise BrokerUnavailable(f"{subject or stream} is not purged: {error!r}") from error

    async def read_from_leader(
        self, stream: str, query: Mapping[str, int | str]
    ) -> StoredMessage | None:
        """Return the message that `query` asks the stream's leader for; None if there is none.

        `query` has `seq` or `last_by_subj`. Unlike a replica, the leader knows all that is stored.
        Raises `BrokerUnavailable` if no answer comes.
        """
        subject = self.api_subject(f"STREAM.MSG.GET.{stream}")
        answer = await self.request(subject, orjson.dumps(dict(query)), STORE_SECONDS)
        if answer is None:
            raise BrokerUnavailable(f"no answer when reading {stream}")
        found = orjson.loads(answer)
        if error := found.get("error"):
            if error.get("err_code") == _NO_MESSAGE:
                return None
            raise BrokerUnavailable(f"{stream} {dict(query)} is not read: {error}")
        message = found["message"]
        headers = await self._client._process_headers(base64.b64decode(message.get("hdrs", "")))
        data = base64.b64decode(message.get("data", ""))
        return StoredMessage(message["seq"], message["subject"], data, headers or {})

    async def read_current(self, stream: str, subject: str) -> StoredMessage | None:
        """Return the last message on a subject that gets one message, or None if there is none.

        A replica that has it answers, so this costs the leader nothing; the leader is asked where
        a replica has none, as it may be behind. Raises `BrokerUnavailable` if no answer comes.
        """
        query = {"last_by_subj": subject}
        found = await self.read(stream, query)
        return found[0] if found else await self.read_from_leader(stream, query)

    async def read_current_subjects(self, stream: str, pattern: str) -> list[StoredMessage]:
        """Return all messages that match a filter, as `read_subject`, none older than the leader's.

        What was stored on one of these subjects before this call is in the result, or has been
        replaced. Raises `BrokerUnavailable`, also if no replica catches up within a second.
        """
        for _ in range(_CATCHUP_READS):
            newest = await self.read_from_leader(stream, {"last_by_subj": pattern})
            found = await self.read_subject(stream, pattern)
            if newest is None or (found and found[-1].seq >= newest.seq):
                return found
            await asyncio.sleep(_CATCHUP_SECONDS)
        raise BrokerUnavailable(f"the replicas of {stream} that answer are behind its leader")

    async def read_subject(self, stream: str, subject: str, after: int = 0) -> list[StoredMessage]:
        """Return all messages on a subject (or filter) with a sequence above `after`, in order.

        The list is empty if there are none. Raises `BrokerUnavailable` if no answer comes.
        """
        found: list[StoredMessage] = []
        while True:
            page = await self.read_filtered(stream, subject, after)
            found += page.messages
            if not page.remaining or not page.messages:
                return found
            after = page.messages[-1].seq

    async def read_filtered(
        self, stream: str, subject: str, after: int = 0, limit: int = _PAGE_MESSAGES
    ) -> MessagePage:
        """Return the next messages on a subject (or filter) with a sequence above `after`.

        They are as many as one page has, up to `limit`; `remaining` says how many are behind them.
        Raises `BrokerUnavailable` if no answer comes.
        """
        query = {**_PAGE_LIMITS, "batch": limit, "next_by_subj": subject, "seq": after + 1}
        return await self.read_page(stream, query)

    async def find_subject(self, stream: str, pattern: str) -> str | None:
        """Return the subject of the last message that matches a filter; None if none matches.

        Use this where only a filter is known, and then read by the exact subject. To read by a
        filter, the broker goes through all messages to the end of the stream, and stores none
        meanwhile: 30 ms where 1,000 subjects have 120,000 messages. The last message is found by
        the broker's index of subjects, in 0.1 ms. Raises `BrokerUnavailable` if no answer comes.
        """
        found = await self.read(stream, {"last_by_subj": pattern})
        return found[0].subject if found else None

    async def read(self, stream: str, query: Mapping[str, int | str]) -> list[StoredMessage]:
        """Return the messages that a direct get (ADR-31) finds; an empty list if nothing matches.

        `query` is the request's JSON; with `batch` it returns several messages, else one. Raises
        `BrokerUnavailable` if no replica answers.
        """
        return (await self.read_page(stream, query)).messages

    async def read_last(self, stream: str, subject: str) -> StoredMessage | None:
        """Return the last message on a subject, asked for by a question that names the subject.

        Rights can be told for such questions by their subjects. None if there is none. Raises
        `BrokerUnavailable` if no replica answers.
        """
        page = await self._read(f"DIRECT.GET.{stream}.{subject}", b"", batched=False)
        return page.messages[0] if page.messages else None

    async def read_page(self, stream: str, query: Mapping[str, int | str]) -> MessagePage:
        """Do as `read`, and also return how many more messages match after those returned.

        Any replica answers, and the broker chooses which. The question is therefore asked up to
        five times with short timeouts, so that a frozen replica is not waited for. Raises
        `BrokerUnavailable` if there is no answer after 2.5 s.
        """
        payload = orjson.dumps(dict(query))
        return await self._read(f"DIRECT.GET.{stream}", payload, batched="batch" in query)

    async def _read(self, call: str, payload: bytes, *, batched: bool) -> MessagePage:
        subject = self.api_subject(call)
        for seconds in _READ_SECONDS:
            try:
                async with running_timeout(seconds):
                    return await self._await_response(PendingRead(batched), subject, payload)
            except TimeoutError:
                continue
        raise BrokerUnavailable(f"NATS did not answer in {sum(_READ_SECONDS):g} s")

    def request_declaration(self) -> None:
        """Ask the processes that declare streams to look whether one is missing or was changed.

        At most once in `_DECLARE_SECONDS`; called here wherever the broker misses a stream.
        """
        now = time.monotonic()
        if now >= self._next_declare_request_at:
            self._next_declare_request_at = now + _DECLARE_SECONDS
            self._client.try_publish_now(subjects.DECLARE, b"", None, "")

    async def call_api(self, call: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        """Return the result of `call`, which is given JetStream's management API to ask the broker.

        Only leaders answer there, so `call` is made up to five times within a few seconds, while
        one may be being elected. Raises nats-py's `NotFoundError`, or `BrokerUnavailable` for any
        other error and when no answer comes.
        """
        for seconds in _READ_SECONDS:
            try:
                return await call(self._jetstream(seconds))
            except NotFoundError as error:
                if error.err_code == NO_STREAM:
                    self.request_declaration()
                raise
            except TimeoutError:
                continue
            except ServiceUnavailableError:  # comes at once, not after the timeout
                await asyncio.sleep(seconds)
            except (nats.errors.Error, OSError) as error:
                raise BrokerUnavailable(f"the call to NATS failed: {error!r}") from error
        raise BrokerUnavailable(f"NATS did not answer in {sum(_READ_SECONDS):g} s")

    async def sample_clock(self) -> ClockSample:
        """Ask the leader of `topology.CLOCK` for the time; return it with when it was asked.

        Raises `BrokerUnavailable` if no answer comes or the stream does not exist.
        """
        subject = self.api_subject(f"STREAM.INFO.{topology.CLOCK}")
        return await self._await_response(PendingClockSample(), subject, b"")

    async def _await_response(
        self,
        response: PendingResponse[T],
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None = None,
        *,
        repeats: bool = False,
    ) -> T:
        """Publish a question to the broker and return the value of its response.

        With `repeats` it is published again while no response comes.
        """
        client, inbox = self._client, self._inbox  # a new client has another inbox
        if not client.is_connected:
            raise NotConnected("not connected to NATS")
        reply = inbox.expect(response, subject)
        if repeats:
            response.resend = partial(client.try_publish_now, subject, payload, headers, reply)
        try:
            if not client.try_publish_now(subject, payload, headers, reply):
                await self._publish_in_time(subject, payload, headers, reply)
            return await response.future
        except StreamMissing:
            self.request_declaration()
            raise
        except StoreRefused as refusal:
            if not (refusal.is_conflict or refusal.is_full):
                self.request_declaration()  # somebody may have edited the stream
            raise
        finally:
            inbox.discard(reply)
            response.close()

    async def _publish_in_time(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, reply: str
    ) -> None:
        try:
            async with running_timeout(STORE_SECONDS):
                await self.publish(subject, payload, headers, reply)
        except TimeoutError:
            raise BrokerUnavailable(f"NATS accepted nothing for {STORE_SECONDS:g} s") from None


@asynccontextmanager
async def connect(url: str, name: str, files: ConnectionFiles = NO_FILES) -> AsyncIterator[Broker]:
    """Connect to the broker and yield the `Broker`; leaving the `async with` block closes it.

    `name` is what the broker calls this process, `files` say who it is. Raises `BrokerUnavailable`
    if no server answers or lets it in, `BrokerMisconfigured` for a file that cannot be used, and as
    `Broker.check_usable` does.
    """
    broker = Broker(url, name, files)
    await broker.open()
    try:
        await broker.check_usable()
    except BaseException:
        await broker.close()
        raise
    coroutines = (broker.run(), clock_sync.keep_synced(broker))
    housekeeping = [asyncio.create_task(each, name="broker") for each in coroutines]
    try:
        yield broker
    finally:
        for task in housekeeping:
            task.cancel()
        await asyncio.wait(housekeeping)
        await broker.close()
