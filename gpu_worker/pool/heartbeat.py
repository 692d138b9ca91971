"""Sends the heartbeats of one model server: soon after a change, and at a regular interval."""

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

_MIN_INTERVAL_SECONDS = 0.01  # heartbeats on change are at least this far apart


class HeartbeatSender:
    """Sends what `build_heartbeat` returns, together with a report on the engine's prefix cache.

    `cache` is the engine to report on, None without one that keeps a cache.
    """

    def __init__(
        self,
        broker: Broker,
        identity: WorkerIdentity,
        build_heartbeat: Callable[[], Heartbeat],
    ) -> None:
        self.cache: ReportsCache | None = None
        self.last_muster_at = -inf  # when a leader last asked for everything: monotonic seconds
        self._broker, self._identity = broker, identity
        self._build_heartbeat = build_heartbeat
        self._cache_reporter = CacheReporter()
        self._changed = asyncio.Event()

    def send_soon(self) -> None:
        """Send a heartbeat within about 10 ms, because something in it has changed."""
        self._changed.set()

    async def listen(self) -> None:
        """Answer each new leader's muster with a heartbeat that has a full cache report.

        Returns once subscribed. Raises `BrokerUnavailable`.
        """
        await self._broker.subscribe(subjects.muster(self._identity.model), self._on_muster)

    async def run(self, interval: Callable[[], float]) -> None:
        """Send heartbeats until cancelled.

        `interval` returns the seconds after which the next one is due if nothing changes before. A
        heartbeat that cannot be sent is logged and dropped.
        """
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
                async with asyncio.timeout(interval()):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()

    def _with_cache_report(self, beat: Heartbeat) -> Heartbeat:
        """Return the heartbeat with a cache report, if one is due."""
        now = time.monotonic()
        if not self._cache_reporter.is_due(now):
            return beat
        cached = self.cache.cached_prefix_hashes() if self.cache else ()
        return replace(beat, **vars(self._cache_reporter.report(cached, now)))

    async def _on_muster(self, msg: Msg) -> None:
        self._cache_reporter.reset()
        self.last_muster_at = time.monotonic()
        self._changed.set()
