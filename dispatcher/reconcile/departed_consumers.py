"""Removes the consumers of workers that have left, so that they do not pile up at the broker."""

import structlog
from nats.js.errors import NotFoundError

from dispatcher.dispatching.model_state import ModelState
from streams import topology
from streams.broker.broker_client import Broker

log = structlog.get_logger()


class DepartedConsumers:
    """The own consumers of workers that serve a version no longer, until they are removed.

    These have drained or died. One of a worker of which nobody has heard an end expires by itself.
    """

    def __init__(self, broker: Broker, state: ModelState) -> None:
        self._broker, self._state = broker, state
        self._departed: set[tuple[str, str]] = set()  # worker and version

    def add(self, worker: str, version: str | None = None) -> None:
        """Note that a worker leaves, with all versions of the model or with one.

        Call it while the fleet still knows what it serves.
        """
        self._departed |= {
            (beat.worker, beat.version)
            for beat in self._state.fleet.last_heartbeats()
            if beat.worker == worker and version in (None, beat.version)
        }

    async def remove(self) -> None:
        """Remove the consumers of those on whom no work lies any more; raises the broker's errors.

        One that serves again keeps its consumer.
        """
        for worker, version in list(self._departed):
            if self._state.has_placed(worker, version):
                continue
            if self._state.fleet.last_heartbeat(worker, version) is None:
                await self._remove(worker, version)
            self._departed.discard((worker, version))

    async def _remove(self, worker: str, version: str) -> None:
        config = topology.worker_consumer(self._state.model, version, worker, 1)
        assert config.durable_name
        try:
            await self._broker.js.delete_consumer(topology.WORK, config.durable_name)
        except NotFoundError:
            return
        log.info("consumer_removed", worker=worker, consumer=config.durable_name)
