"""The heartbeat of one pool: at once when something has changed, and regularly."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf

import structlog
from nats.aio.msg import Msg

from gpu_worker.engine import Caching
from gpu_worker.holdings import Holdings
from gpu_worker.outcome import Identity
from streams import subjects
from streams.connection import Broker
from streams.errors import BrokerUnavailable
from streams.messages import Beat

log = structlog.get_logger()

_GAP_SECONDS = 0.01  # beats on change are at least this far apart


class Heart:
    """Sends what `beat` says of the moment, and what the engine has come to hold in its cache."""

    def __init__(self, broker: Broker, who: Identity, beat: Callable[[], Beat]) -> None:
        self.cache: Caching | None = None
        self.mustered_at = -inf  # when a leader has last asked for all: monotonic seconds
        self._broker, self._who, self._beat = broker, who, beat
        self._holdings = Holdings()
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Beat soon."""
        self._changed.set()

    async def listen(self) -> None:
        """Beat, and tell all that is held, when a new leader asks. Raises `BrokerUnavailable`."""
        await self._broker.subscribe(subjects.muster(self._who.model), self._on_muster)

    async def run(self, rest: Callable[[], float]) -> None:
        """Beat until cancelled; `rest` says how long the next beat may wait for a change."""
        subject = subjects.fleet(self._who.model, self._who.worker)
        while True:
            try:
                await self._broker.publish(subject, self._telling(self._beat()).pack())
            except BrokerUnavailable as error:
                log.warning("beat_not_sent", reason=str(error))
            await asyncio.sleep(_GAP_SECONDS)
            try:
                async with asyncio.timeout(rest()):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()

    def _telling(self, beat: Beat) -> Beat:
        """With what has changed of what the engine holds."""
        now = time.monotonic()
        if not self._holdings.is_due(now):
            return beat
        held = self.cache.holds() if self.cache else ()
        return replace(beat, **vars(self._holdings.tell(held, now)))

    async def _on_muster(self, msg: Msg) -> None:
        self._holdings.tell_all()
        self.mustered_at = time.monotonic()
        self._changed.set()
