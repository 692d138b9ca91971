"""Waiting submissions: what producers have published over NATS and no gateway has accepted yet."""

import asyncio
from collections.abc import Mapping

import structlog

from registry.tenants import Tenants
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable
from streams.records import request_queue
from streams.subjects import Lane, Priority

log = structlog.get_logger()

COUNT_SECONDS = 2.0


class WaitingSubmissions:
    """Counts all tenants' waiting submissions while `run` runs; one for all models of a process.

    A submission that a gateway is about to accept counts as waiting.
    """

    def __init__(self, broker: Broker, tenants: Tenants) -> None:
        self._broker, self._tenants = broker, tenants
        self._counts: dict[Lane, int] = {}

    def of_model(self, model: str) -> Mapping[tuple[str, Priority], int]:
        """Return the number that wait for a model by tenant and priority, as last counted."""
        return {
            (lane.tenant, lane.priority): n
            for lane, n in self._counts.items()
            if lane.model == model
        }

    async def run(self) -> None:
        """Count every `COUNT_SECONDS` until cancelled; what is not known stays as it was."""
        while True:
            try:
                self._counts = await self._count()
            except BrokerUnavailable as error:
                log.debug("submissions_not_counted", reason=str(error))
            await asyncio.sleep(COUNT_SECONDS)

    async def _count(self) -> dict[Lane, int]:
        """Ask for one tenant after the other, so that the broker is not asked for all at once."""
        found: dict[Lane, int] = {}
        for name, tenant in list(self._tenants.by_name.items()):
            if tenant.publishes:
                found |= await request_queue.count_submissions(self._broker, name)
        return found
