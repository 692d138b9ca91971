"""Room for results: no response is stored whose result might find none.

The last tenth of the stream is for requests that are accepted already.
"""

import asyncio

import structlog
from nats.js.errors import NotFoundError
from prometheus_client import Gauge

from streams import topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable, StorageFull

log = structlog.get_logger()
RESULTS_USED = Gauge(
    "millstream_results_used_ratio", "Part of the stream of results that is in use, 0 to 1."
)

CHECK_SECONDS = 1.0
FULL_RATIO = 0.9
RETRY_SECONDS = 10.0


class ResultSpace:
    """Knows how full the stream of results is, while `run` runs."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self.used_ratio = broker, 0.0

    def check(self) -> None:
        """Raise `StorageFull` if there is no room for the results of further responses."""
        if self.used_ratio >= FULL_RATIO:
            raise StorageFull(
                f"the stream {topology.RESULTS} is full to {self.used_ratio:.0%}, and what is left "
                "is for requests accepted before; delete responses, or send store: false",
                RETRY_SECONDS,
            )

    async def run(self) -> None:
        """Look every second, until cancelled; what is not known stays as it was."""
        while True:
            try:
                info = await declaration.stream_info(self._broker, topology.RESULTS)
            except (BrokerUnavailable, NotFoundError) as error:
                log.debug("results_not_checked", reason=str(error))
            else:
                limit = max(0, info.config.max_bytes or 0)
                self._update(info.state.bytes / limit if limit else 0.0)
            await asyncio.sleep(CHECK_SECONDS)

    def _update(self, used_ratio: float) -> None:
        before, self.used_ratio = self.used_ratio, used_ratio
        RESULTS_USED.set(used_ratio)
        if used_ratio >= FULL_RATIO > before:
            log.error("results_full", used_ratio=round(used_ratio, 3))
        elif before >= FULL_RATIO > used_ratio:
            log.info("results_have_room", used_ratio=round(used_ratio, 3))
