"""Hears the heartbeats of a model's other workers, for as long as their free capacity matters."""

import time
from types import TracebackType
from typing import Self

import structlog
from nats.aio.msg import Msg

from gpu_worker.identity import WorkerIdentity
from gpu_worker.pool.peer_capacity import PeerCapacity
from streams import subjects
from streams.broker.broker_client import Broker, BrokerSubscription
from streams.coordination.heartbeats import InvalidHeartbeat, parse_heartbeat
from streams.errors import BrokerUnavailable

log = structlog.get_logger()


class PeerHeartbeats:
    """The free capacity of peers (other workers of the same model version) in `capacity`.

    Async context manager, inside of which it is kept current.
    """

    def __init__(self, broker: Broker, identity: WorkerIdentity) -> None:
        self.capacity = PeerCapacity(identity)
        self._broker, self._model = broker, identity.model
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
            self.capacity.record_heartbeat(beat, time.monotonic())
