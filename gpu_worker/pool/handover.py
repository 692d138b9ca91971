"""What a worker that leaves hands over, and when: as soon as another one has room for it."""

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

import structlog
from nats.aio.msg import Msg

from gpu_worker.attempt.attempt import Attempt
from gpu_worker.identity import WorkerIdentity
from gpu_worker.pool.peer_capacity import PeerCapacity
from streams import subjects
from streams.broker.connection import Broker, BrokerSubscription
from streams.errors import BrokerUnavailable
from streams.messages import Heartbeat

log = structlog.get_logger()


class Handover:
    """Listens to the other workers of a pool for as long as it is entered."""

    def __init__(self, broker: Broker, who: WorkerIdentity) -> None:
        self._broker, self._model = broker, who.model
        self._peers = PeerCapacity(who)
        self._subscription: BrokerSubscription | None = None

    async def __aenter__(self) -> Self:
        """Ask them all for a beat. Who cannot be heard has no room."""
        try:
            subject = subjects.fleet_of(self._model)
            self._subscription = await self._broker.subscribe(subject, self._on_beat)
            await self._broker.publish(subjects.muster(self._model))
        except BrokerUnavailable as error:
            log.warning("peers_unreachable", reason=str(error))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._subscription:
            await self._subscription.unsubscribe()

    async def _on_beat(self, msg: Msg) -> None:
        self._peers.record_heartbeat(Heartbeat.unpack(msg.data), time.monotonic())

    def choose_attempts(self, attempts: Iterable[Attempt], seconds: float) -> Iterator[Attempt]:
        """Those that others have room for and that would not end here within so many seconds.

        First comes what has not begun, then what would take longest.
        """
        for attempt in sorted(attempts, key=_seconds_left, reverse=True):
            late = attempt.is_active and _seconds_left(attempt) > seconds
            if late and self._peers.reserve(attempt.envelope.cost, time.monotonic()):
                yield attempt


def _seconds_left(attempt: Attempt) -> float:
    """Until its end; infinite if that is not known yet."""
    left = attempt.seconds_left
    return float("inf") if left is None else left
