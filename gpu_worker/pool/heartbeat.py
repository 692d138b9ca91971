"""The heartbeat of one pool: at once when something has changed, and regularly."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf

import structlog
from nats.aio.msg import Msg

from gpu_worker.engines.engine import ReportsCache
from gpu_worker.identity import WorkerIdentity
from gpu_worker.pool.cache_report import CacheReporter
from streams import subjects
from streams.broker.connection import Broker
from streams.errors import BrokerUnavailable
from streams.messages import Heartbeat

log = structlog.get_logger()

_MIN_INTERVAL_SECONDS = 0.01  # beats on change are at least this far apart


class HeartbeatSender:
    """Sends what `beat` says of the moment, and what the engine has come to hold in its cache."""

    def __init__(self, broker: Broker, who: WorkerIdentity, beat: Callable[[], Heartbeat]) -> None:
        self.cache: ReportsCache | None = None
        self.last_muster_at = -inf  # when a leader has last asked for all: monotonic seconds
        self._broker, self._identity, self._build_heartbeat = broker, who, beat
        self._cache_reporter = CacheReporter()
        self._changed = asyncio.Event()

    def send_soon(self) -> None:
        """Beat soon."""
        self._changed.set()

    async def listen(self) -> None:
        """Beat, and tell all that is held, when a new leader asks. Raises `BrokerUnavailable`."""
        await self._broker.subscribe(subjects.muster(self._identity.model), self._on_muster)

    async def run(self, rest: Callable[[], float]) -> None:
        """Beat until cancelled; `rest` says how long the next beat may wait for a change."""
        subject = subjects.fleet(self._identity.model, self._identity.worker)
        while True:
            try:
                await self._broker.publish(
                    subject, self._with_cache_report(self._build_heartbeat()).pack()
                )
            except BrokerUnavailable as error:
                log.warning("heartbeat_not_sent", reason=str(error))
            await asyncio.sleep(_MIN_INTERVAL_SECONDS)
            try:
                async with asyncio.timeout(rest()):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()

    def _with_cache_report(self, beat: Heartbeat) -> Heartbeat:
        """With what has changed of what the engine holds."""
        now = time.monotonic()
        if not self._cache_reporter.is_due(now):
            return beat
        held = self.cache.cached_prefix_hashes() if self.cache else ()
        return replace(beat, **vars(self._cache_reporter.report(held, now)))

    async def _on_muster(self, msg: Msg) -> None:
        self._cache_reporter.reset()
        self.last_muster_at = time.monotonic()
        self._changed.set()
