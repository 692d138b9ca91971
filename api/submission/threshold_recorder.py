"""Stores that a threshold of a quota is reached: once for each period, over any number of gateways.

The stream THRESHOLDS has one message for each subject, written by compare-and-set against none; so
whoever sends webhooks reads each event once.
"""

import structlog
from prometheus_client import Counter

from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import BrokerUnavailable
from streams.headers import EXPECTED_LAST
from streams.records.quota_thresholds import QuotaThreshold

log = structlog.get_logger()

REACHED = Counter(
    "millstream_quota_thresholds_total",
    "Thresholds of quotas of a day or month that were reached, by the gateway that told it.",
    ["quota", "percent"],
)
_MAX_NOTED = 10_000  # subjects; when there are more they are looked up at the broker again


class ThresholdRecorder:
    """Tells thresholds that this gateway sees reached, unless another one has."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._noted: set[str] = set()

    def note(self, reached: QuotaThreshold) -> bool:
        """Return True if this threshold is new here, and is to be stored."""
        if reached.subject in self._noted:
            return False
        if len(self._noted) >= _MAX_NOTED:
            self._noted.clear()
        self._noted.add(reached.subject)
        return True

    async def store(self, reached: QuotaThreshold) -> None:
        """Best effort: store the event, log and count it, unless it is stored already.

        One that is not stored is tried again with the next request that reaches the threshold.
        """
        payload = reached.encode(self._broker.clock.now())
        try:
            await self._broker.store(reached.subject, payload, {EXPECTED_LAST: "0"})
        except StoreRefused as refusal:
            if not refusal.is_conflict:
                self._forget(reached, refusal)
            return
        except BrokerUnavailable as error:
            self._forget(reached, error)
            return
        REACHED.labels(reached.quota, str(reached.percent)).inc()
        log.warning("quota_threshold_reached", **vars(reached))

    def _forget(self, reached: QuotaThreshold, error: Exception) -> None:
        self._noted.discard(reached.subject)
        log.warning("threshold_not_stored", subject=reached.subject, reason=str(error))
