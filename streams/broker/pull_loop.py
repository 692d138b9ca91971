"""Pull loop: keeps one outstanding pull on a consumer, for as many messages as there is room."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import orjson
import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from streams.broker.broker_client import Broker
from streams.delivery_reply import DeliveryReply
from streams.errors import BrokerMisconfigured, BrokerUnavailable

log = structlog.get_logger()

# A frozen process still has a pull outstanding. It must expire before the process's work is
# delivered again (the ack wait, 3 s), or the broker would deliver it to the frozen process again.
EXPIRES_SECONDS = 2.0
HEARTBEAT_SECONDS = 0.5
_SILENCE_SECONDS = 2 * HEARTBEAT_SECONDS + 0.5  # a pull without heartbeats for so long is lost
_PAUSE_SECONDS = 0.5
_ANSWER_SECONDS = 1.0
_NANOSECONDS = 1_000_000_000
_HEARTBEAT, _NO_MESSAGES, _EXPIRED = "100", "404", "408"


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that a consumer has handed to this process, to be settled by it.

    `ack`, `nak` and `terminate` settle it; `in_progress` asks for more time. If the consumer's ack
    wait runs out before, the broker delivers the message again, perhaps to another process. These
    calls send one message without waiting for a confirmation, and raise `BrokerUnavailable` if it
    cannot be sent.
    """

    broker: Broker
    subject: str
    data: bytes
    headers: Mapping[str, str]
    seq: int  # in the stream
    num_delivered: int  # 1 the first time
    reply: str

    @property
    def stored_at(self) -> float:
        """Time at which the message was stored, in epoch seconds."""
        return DeliveryReply.parse(self.reply).stored_ns / 1e9

    async def ack(self) -> None:
        """Tell the broker that the message is done and must not be delivered again.

        There is no confirmation, and a lost ack means another delivery: store results before this
        call. Raises `BrokerUnavailable` if the ack cannot be sent.
        """
        await self.broker.publish(self.reply, b"+ACK")

    async def in_progress(self) -> None:
        """Tell the broker that the message is still in work, which restarts its ack wait.

        There is no confirmation. Raises `BrokerUnavailable` if nothing can be sent.
        """
        await self.broker.publish(self.reply, b"+WPI")

    async def nak(self, delay_seconds: float = 0.0) -> None:
        """Give the message back to the broker, which delivers it again after `delay_seconds`.

        There is no confirmation. Raises `BrokerUnavailable` if nothing can be sent.
        """
        delay = {"delay": int(delay_seconds * _NANOSECONDS)}
        await self.broker.publish(self.reply, b"-NAK " + orjson.dumps(delay))

    async def terminate(self) -> None:
        """Tell the broker never to deliver the message again, although it was not processed.

        There is no confirmation. Raises `BrokerUnavailable` if nothing can be sent.
        """
        await self.broker.publish(self.reply, b"+TERM")


class PullLoop:
    """Pulls messages from one durable consumer for as long as `run` runs.

    `free_capacity()` says how many messages may come now; call `wake()` when it has grown.
    `on_delivery` gets each delivery and must not block. The loop survives reconnects, missed
    heartbeats and restarts of the consumer. With `declare`, which is called when the broker refuses
    a pull and should create the consumer, it also survives the consumer's removal.
    """

    def __init__(
        self,
        broker: Broker,
        stream: str,
        consumer: str,
        free_capacity: Callable[[], int],
        on_delivery: Callable[[Delivery], None],
        declare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._broker, self._stream, self.consumer = broker, stream, consumer
        self._declare = declare
        self._free_capacity, self._on_delivery = free_capacity, on_delivery
        self._wakeup = asyncio.Event()
        self._pull_ended = asyncio.Event()  # of the outstanding pull
        self._pull_number = 0
        self._outstanding = 0  # messages that the outstanding pull may still bring
        self._last_heard_at = 0.0
        self._is_refused = self._is_lost = False

    def wake(self) -> None:
        """Make a loop that waits for capacity ask `free_capacity()` again; returns at once."""
        self._wakeup.set()

    def withdraw(self) -> None:
        """Give up the outstanding pull, for which there is no room now, and pull anew.

        Returns at once. Messages that the broker still sends for the old pull may be ignored; they
        are delivered again after the ack wait.
        """
        self._mark_lost()

    async def run(self) -> None:
        """Pull until cancelled; never returns. While the broker is unavailable, retry.

        When cancelled, messages that are on their way are still delivered, for at most one second.
        """
        self._broker.on_reconnect.append(self._mark_lost)
        try:
            while True:
                try:
                    await self._run_until_lost()
                except (BrokerUnavailable, BrokerMisconfigured) as error:
                    log.warning("pull_paused", consumer=self.consumer, reason=str(error))
                    await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            self._broker.on_reconnect.remove(self._mark_lost)

    async def _run_until_lost(self) -> None:
        """Pull until the pull is lost, on a new inbox: messages of earlier pulls arrive nowhere."""
        self._is_lost = False
        inbox = self._broker.client.new_inbox()
        subscription = await self._broker.subscribe(f"{inbox}.*", self._on_message, renewed=False)
        try:
            while not self._is_lost:
                await self._pull_or_wait(inbox)
        finally:
            await subscription.drain()

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
        subject = self._broker.api_subject(f"CONSUMER.MSG.NEXT.{self._stream}.{self.consumer}")
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
                    log.warning("pull_lost", stream=self._stream, consumer=self.consumer)
                    self._mark_lost()

    async def _on_message(self, msg: Msg) -> None:
        self._last_heard_at = asyncio.get_running_loop().time()
        if (status := _status(msg)) is not None:
            self._on_status(msg.subject, status)
            return
        self._outstanding -= 1
        if self._outstanding == 0:
            self._pull_ended.set()
        self._on_delivery(to_delivery(self._broker, msg))

    def _on_status(self, subject: str, status: str) -> None:
        """End the pull that a status belongs to; heartbeats and statuses of older pulls do not."""
        if status == _HEARTBEAT or subject.rpartition(".")[2] != str(self._pull_number):
            return
        # any other status: a leader is being elected, or the consumer does not exist at the moment
        self._is_refused = status not in (_NO_MESSAGES, _EXPIRED)
        self._pull_ended.set()


async def pull_one(broker: Broker, stream: str, consumer: str) -> Delivery | None:
    """Pull one message from a consumer; return None if the consumer has none at the moment.

    Raises `BrokerUnavailable` if no answer comes within one second: the consumer may not exist.
    """
    subject = broker.api_subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}")
    query = orjson.dumps({"batch": 1, "no_wait": True})
    try:
        # old_style uses an inbox for this request alone: a delivery keeps the subject that it was
        # stored under, by which nats-py's shared inbox could not match it
        msg = await broker.client.request(subject, query, timeout=_ANSWER_SECONDS, old_style=True)
    except (NatsError, TimeoutError, OSError) as error:
        raise BrokerUnavailable(f"no answer from consumer {consumer}: {error!r}") from error
    return to_delivery(broker, msg) if _status(msg) is None else None


def _status(msg: Msg) -> str | None:
    """Return the status that the broker tells itself; None for a delivery, which has a reply.

    A stored message may have a header `Status` of its own.
    """
    return None if msg.reply else (msg.headers or {}).get("Status")


def to_delivery(broker: Broker, msg: Msg) -> Delivery:
    """Return a `Delivery` made of a message that a JetStream consumer has delivered."""
    told, headers = DeliveryReply.parse(msg.reply), msg.headers or {}
    return Delivery(broker, msg.subject, msg.data, headers, told.seq, told.num_delivered, msg.reply)
