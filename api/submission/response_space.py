"""Room for stored responses: none is accepted whose result might find no room.

What is promised to batches counts as used. The last tenth of the stream is for requests that are
accepted already.
"""

import asyncio

import structlog
from nats.js.errors import NotFoundError
from prometheus_client import Gauge

from streams import topology
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable, StorageFull
from streams.records.jobs.batch_store import BatchStore
from streams.records.jobs.result_space import read_result_space

log = structlog.get_logger()
RESULTS_USED = Gauge(
    "millstream_results_used_ratio",
    "Part of the stream of results that is used, or promised to batches.",
)

CHECK_SECONDS = 2.0
FULL_RATIO = 0.9
RETRY_SECONDS = 10.0


class ResponseSpace:
    """Knows how full the stream of results is, while `run` runs."""

    def __init__(self, broker: Broker, batches: BatchStore) -> None:
        self._broker, self._batches, self.used_ratio = broker, batches, 0.0

    def check(self) -> None:
        """Raise `StorageFull` if there is no room for the results of further responses."""
        if self.used_ratio >= FULL_RATIO:
            raise StorageFull(
                f"{self.used_ratio:.0%} of {topology.RESULTS} are used or promised; the rest is "
                "for what was accepted: delete responses, or send store: false",
                RETRY_SECONDS,
            )

    async def run(self) -> None:
        """Look every two seconds, until cancelled; what is not known stays as it was."""
        while True:
            try:
                space = await read_result_space(self._broker, self._batches)
            except (BrokerUnavailable, NotFoundError) as error:
                log.debug("results_not_checked", reason=str(error))
            else:
                self._update(1 - space.free / space.limit if space.limit else 0.0)
            await asyncio.sleep(CHECK_SECONDS)

    def _update(self, used_ratio: float) -> None:
        before, self.used_ratio = self.used_ratio, used_ratio
        RESULTS_USED.set(used_ratio)
        if used_ratio >= FULL_RATIO > before:
            log.error("results_full", used_ratio=round(used_ratio, 3))
        elif before >= FULL_RATIO > used_ratio:
            log.info("results_have_room", used_ratio=round(used_ratio, 3))
