"""What a worker that leaves hands over, and when: as soon as another one has room for it."""

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

import structlog
from nats.aio.msg import Msg

from gpu_worker.attempt import Attempt
from gpu_worker.fellows import Fellows
from gpu_worker.outcome import Identity
from streams import subjects
from streams.connection import Broker, Subscribed
from streams.errors import BrokerUnavailable
from streams.messages import Beat

log = structlog.get_logger()


class HandOver:
    """Listens to the other workers of a pool for as long as it is entered."""

    def __init__(self, broker: Broker, who: Identity) -> None:
        self._broker, self._model = broker, who.model
        self._fellows = Fellows(who)
        self._subscribed: Subscribed | None = None

    async def __aenter__(self) -> Self:
        """Ask them all for a beat. Who cannot be heard has no room."""
        try:
            subject = subjects.fleet_of(self._model)
            self._subscribed = await self._broker.subscribe(subject, self._on_beat)
            await self._broker.publish(subjects.muster(self._model))
        except BrokerUnavailable as error:
            log.warning("fellows_not_heard", reason=str(error))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._subscribed:
            await self._subscribed.unsubscribe()

    async def _on_beat(self, msg: Msg) -> None:
        self._fellows.beat(Beat.unpack(msg.data), time.monotonic())

    def choose(self, attempts: Iterable[Attempt], seconds: float) -> Iterator[Attempt]:
        """Those that others have room for and that would not end here within so many seconds.

        First comes what has not begun, then what would take longest.
        """
        for attempt in sorted(attempts, key=_seconds, reverse=True):
            late = attempt.goes_on and _seconds(attempt) > seconds
            if late and self._fellows.take(attempt.envelope.cost, time.monotonic()):
                yield attempt


def _seconds(attempt: Attempt) -> float:
    """Until its end; infinite if that is not known yet."""
    left = attempt.seconds_left
    return float("inf") if left is None else left
