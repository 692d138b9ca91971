"""The pull loop: one outstanding pull on a consumer, asked for only what there is room for."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import orjson
import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from streams.broker.connection import Broker
from streams.errors import BrokerUnavailable
from streams.subjects import parse_ack_subject

log = structlog.get_logger()

# A frozen process still has pulls outstanding: they must be gone by the time that its work is
# delivered again (the ack wait, 3 s), or the broker would give it right back.
EXPIRES_SECONDS = 2.0
HEARTBEAT_SECONDS = 0.5
_SILENCE_SECONDS = 2 * HEARTBEAT_SECONDS + 0.5  # a pull that beats no more is lost
_PAUSE_SECONDS = 0.5
_ANSWER_SECONDS = 1.0
_NANOSECONDS = 1_000_000_000
_HEARTBEAT, _NO_MESSAGES, _EXPIRED = "100", "404", "408"


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that this process holds until it settles it, or until the ack wait runs out."""

    broker: Broker
    subject: str
    data: bytes
    headers: Mapping[str, str]
    seq: int  # in the stream
    num_delivered: int  # 1 the first time
    reply: str

    async def ack(self) -> None:
        """Done with it. A lost ack means another delivery, so record first and ack second."""
        await self.broker.publish(self.reply, b"+ACK")

    async def in_progress(self) -> None:
        """Restart the ack wait."""
        await self.broker.publish(self.reply, b"+WPI")

    async def nak(self, delay_seconds: float = 0.0) -> None:
        """Give it back, to be delivered again after the delay."""
        delay = {"delay": int(delay_seconds * _NANOSECONDS)}
        await self.broker.publish(self.reply, b"-NAK " + orjson.dumps(delay))

    async def terminate(self) -> None:
        """Never deliver it again."""
        await self.broker.publish(self.reply, b"+TERM")


class PullLoop:
    """Pulls from one durable consumer for as long as `run` runs.

    `room()` says how many messages may come now; call `wake()` when it has grown. `take` gets each
    delivery and must not block. Survives reconnects, missed heartbeats and consumer restarts; with
    `declare`, which is called when the broker refuses a pull, also that the consumer was removed.
    """

    def __init__(
        self,
        broker: Broker,
        stream: str,
        consumer: str,
        room: Callable[[], int],
        take: Callable[[Delivery], None],
        declare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._broker, self._stream, self._consumer = broker, stream, consumer
        self._declare = declare
        self._free_capacity, self._on_delivery = room, take
        self._wakeup = asyncio.Event()
        self._pull_ended = asyncio.Event()  # the outstanding pull is
        self._pull_number = 0
        self._outstanding = 0
        self._last_heard_at = 0.0
        self._is_refused = self._is_lost = False

    def wake(self) -> None:
        self._wakeup.set()

    def withdraw(self) -> None:
        """Give up the outstanding pull: there is no room for what it asked for."""
        self._mark_lost()

    async def run(self) -> None:
        """Pull until cancelled; what is on its way then is still taken."""
        self._broker.on_reconnect.append(self._mark_lost)
        try:
            while True:
                try:
                    await self._run_until_lost()
                except BrokerUnavailable as error:
                    log.warning("pull_paused", consumer=self._consumer, reason=str(error))
                    await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            self._broker.on_reconnect.remove(self._mark_lost)

    async def _run_until_lost(self) -> None:
        """Pull on a new inbox: what the broker still sends for a lost pull has no address then."""
        self._is_lost = False
        inbox = self._broker.client.new_inbox()
        subscribed = await self._broker.subscribe(f"{inbox}.*", self._on_message)
        try:
            while not self._is_lost:
                await self._pull_or_wait(inbox)
        finally:
            await subscribed.drain()

    async def _pull_or_wait(self, inbox: str) -> None:
        wanted = self._free_capacity()
        if wanted > 0:
            await self._pull(inbox, wanted)
        else:
            self._wakeup.clear()
            await self._wakeup.wait()

    def _mark_lost(self) -> None:
        self._is_lost = True
        self._pull_ended.set()
        self._wakeup.set()

    async def _pull(self, inbox: str, wanted: int) -> None:
        self._pull_ended.clear()
        self._pull_number += 1
        self._outstanding, self._is_refused = wanted, False
        self._last_heard_at = asyncio.get_running_loop().time()
        query = {
            "batch": wanted,
            "expires": int(EXPIRES_SECONDS * _NANOSECONDS),
            "idle_heartbeat": int(HEARTBEAT_SECONDS * _NANOSECONDS),
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        await self._broker.publish(
            subject, orjson.dumps(query), reply=f"{inbox}.{self._pull_number}"
        )
        await self._wait_until_ended()
        if self._is_refused:
            await asyncio.sleep(_PAUSE_SECONDS)
            if self._declare:
                await self._declare()

    async def _wait_until_ended(self) -> None:
        while not self._pull_ended.is_set():
            silent_at = self._last_heard_at + _SILENCE_SECONDS
            try:
                async with asyncio.timeout_at(silent_at):
                    await self._pull_ended.wait()
            except TimeoutError:
                if self._last_heard_at + _SILENCE_SECONDS <= silent_at:
                    log.warning("pull_lost", stream=self._stream, consumer=self._consumer)
                    self._mark_lost()

    async def _on_message(self, msg: Msg) -> None:
        self._last_heard_at = asyncio.get_running_loop().time()
        if msg.headers and (status := msg.headers.get("Status")) is not None:
            self._on_status(msg.subject, status)
            return
        self._outstanding -= 1
        if self._outstanding == 0:
            self._pull_ended.set()
        self._on_delivery(to_delivery(self._broker, msg))

    def _on_status(self, subject: str, status: str) -> None:
        """A status ends its pull, unless it is a heartbeat; earlier pulls mean nothing now."""
        if status == _HEARTBEAT or subject.rpartition(".")[2] != str(self._pull_number):
            return
        # anything else: a leader is being elected, or there is no such consumer just now
        self._is_refused = status not in (_NO_MESSAGES, _EXPIRED)
        self._pull_ended.set()


async def pull_one(broker: Broker, stream: str, consumer: str) -> Delivery | None:
    """The next message that a consumer has for anybody who asks; None if there is none now.

    Raises `BrokerUnavailable` when nobody answers: there may be no such consumer.
    """
    subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
    query = orjson.dumps({"batch": 1, "no_wait": True})
    try:
        # by an inbox of its own: what is delivered bears the subject that it was stored under
        msg = await broker.client.request(subject, query, timeout=_ANSWER_SECONDS, old_style=True)
    except (NatsError, TimeoutError, OSError) as error:
        raise BrokerUnavailable(f"no answer from consumer {consumer}: {error!r}") from error
    return None if msg.headers and "Status" in msg.headers else to_delivery(broker, msg)


def to_delivery(broker: Broker, msg: Msg) -> Delivery:
    """Read a JetStream delivery."""
    delivered, seq = parse_ack_subject(msg.reply)
    return Delivery(broker, msg.subject, msg.data, msg.headers or {}, seq, delivered, msg.reply)
