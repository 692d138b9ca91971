"""Chooses the attempts that a draining worker hands over to peers that have free capacity."""

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
from streams.broker.broker_client import Broker, BrokerSubscription
from streams.coordination.heartbeats import InvalidHeartbeat, parse_heartbeat
from streams.errors import BrokerUnavailable

log = structlog.get_logger()


class Handover:
    """Chooses, while a worker drains, which of its attempts to leave to other workers.

    Async context manager, used once for each drain of a model server. Inside it, the free capacity
    of peers (other workers of the same model version) is tracked from their heartbeats.
    """

    def __init__(self, broker: Broker, identity: WorkerIdentity) -> None:
        self._broker, self._model = broker, identity.model
        self._peers = PeerCapacity(identity)
        self._subscription: BrokerSubscription | None = None

    async def __aenter__(self) -> Self:
        """Subscribe to heartbeats of the model's workers, and ask all of them for one now.

        Without a broker no peer counts as having capacity.
        """
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
        try:
            beat = parse_heartbeat(msg.subject, msg.headers or {}, msg.data)
        except InvalidHeartbeat as error:
            log.warning("heartbeat_ignored", subject=msg.subject, reason=str(error))
        else:
            self._peers.record_heartbeat(beat, time.monotonic())

    def choose_attempts(self, attempts: Iterable[Attempt], seconds: float) -> Iterator[Attempt]:
        """Yield attempts that would not end here within `seconds` and that a peer could take now.

        Attempts that were told to stop are left out. Those without a measured pace come first, then
        those that would take longest. Each attempt yielded is counted against the free capacity of
        a peer; the caller has to stop it. Yields nothing while no peer is known.
        """
        for attempt in sorted(attempts, key=_seconds_left, reverse=True):
            is_late = attempt.is_active and _seconds_left(attempt) > seconds
            if is_late and self._peers.reserve(attempt.envelope.cost, time.monotonic()):
                yield attempt


def _seconds_left(attempt: Attempt) -> float:
    """Return the seconds until the attempt's end; infinite while that cannot be told."""
    seconds = attempt.seconds_left
    return float("inf") if seconds is None else seconds
