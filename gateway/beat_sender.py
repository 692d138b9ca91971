"""Sends this gateway's beats: how busy it is, for whoever decides how many gateways there are."""

import asyncio
import time
from collections.abc import Callable

import structlog

from gateway.context import GatewayContext
from streams import subjects
from streams.coordination.gateway_beats import GatewayBeat
from streams.errors import BrokerUnavailable

log = structlog.get_logger()

TIMER_SECONDS = 0.25
TIMERS_PER_BEAT = 4


class GatewayBeatSender:
    """Sends a beat about once a second; `count_connections` tells how many are open."""

    def __init__(self, context: GatewayContext, count_connections: Callable[[], int]) -> None:
        self._context, self._count_connections = context, count_connections

    async def run(self) -> None:
        """Send beats until cancelled; one that cannot be sent is logged and dropped."""
        while True:
            beat = self._build_beat(await _measure_loop_lag())
            try:
                await self._context.broker.publish(subjects.gateway(beat.gateway), beat.pack())
            except BrokerUnavailable as error:
                log.warning("gateway_beat_not_sent", reason=str(error))

    def _build_beat(self, loop_lag_seconds: float) -> GatewayBeat:
        context = self._context
        return GatewayBeat(
            context.settings.id,
            self._count_connections(),
            context.preparation.requests,
            context.preparation.seconds,
            loop_lag_seconds,
            context.draining.is_set(),
        )


async def _measure_loop_lag() -> float:
    """Wait for as long as it is between two beats; return the longest delay of a timer meanwhile.

    It is in seconds.
    """
    lag = 0.0
    for _ in range(TIMERS_PER_BEAT):
        began = time.perf_counter()
        await asyncio.sleep(TIMER_SECONDS)
        lag = max(lag, time.perf_counter() - began - TIMER_SECONDS)
    return lag
