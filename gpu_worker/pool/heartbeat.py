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
from streams.broker.broker_client import Broker, BrokerSubscription
from streams.errors import BrokerUnavailable
from streams.messages import Heartbeat

log = structlog.get_logger()

_MIN_INTERVAL_SECONDS = 0.01  # heartbeats on change are at least this far apart


class HeartbeatSender:
    """Sends one model server's heartbeats, each as `build_heartbeat` returns it.

    A report on which prompt prefixes the engine has cached is added at most every 0.1 s. It is
    about the engine in `cache`, None while there is no engine that caches prefixes.
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
        self._musters: BrokerSubscription | None = None

    def send_soon(self) -> None:
        """Have `run` send a heartbeat within about 10 ms, because something in it has changed.

        Returns at once. Several calls within that time lead to one heartbeat.
        """
        self._changed.set()

    async def listen(self) -> None:
        """Subscribe to musters, in which a new dispatcher leader asks all workers for a heartbeat.

        Returns once subscribed. From then on, `run` answers each muster within about 10 ms, with a
        full cache report. Raises `BrokerUnavailable` if the broker does not confirm the
        subscription.
        """
        self._musters = await self._broker.subscribe(
            subjects.muster(self._identity.model), self._on_muster
        )

    async def stop_listening(self) -> None:
        """Answer musters no longer. Idempotent."""
        if self._musters:
            await self._musters.unsubscribe()
            self._musters = None

    async def run(self, interval: Callable[[], float]) -> None:
        """Send heartbeats until cancelled: one at the start, after each change, and at an interval.

        `interval` returns the seconds after which the next one is due if nothing changes before. A
        heartbeat that cannot be sent is logged and dropped, and nothing is raised.
        """
        while True:
            await self.send()
            await asyncio.sleep(_MIN_INTERVAL_SECONDS)
            try:
                async with asyncio.timeout(interval()):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()

    async def send(self) -> None:
        """Send one heartbeat now.

        Best effort: if the broker is unavailable, that is logged and nothing is raised.
        """
        subject = subjects.fleet(self._identity.model, self._identity.worker)
        try:
            await self._broker.publish(
                subject, self._with_cache_report(self._build_heartbeat()).pack()
            )
        except BrokerUnavailable as error:
            log.warning("heartbeat_not_sent", reason=str(error))

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
