"""How late the event loop runs what is due: nothing may hold it for more than 5 ms."""

import asyncio
import time

from prometheus_client import Gauge

INTERVAL_SECONDS = 0.25  # ten a second were a quarter of all that an idle worker does
WINDOW = 20  # looks

LAG = Gauge("millstream_event_loop_lag_seconds", "The longest delay of a timer, last 5 seconds.")


async def measure_lag() -> None:
    """Measure until cancelled."""
    delays = [0.0] * WINDOW
    look = 0
    while True:
        began = time.perf_counter()
        await asyncio.sleep(INTERVAL_SECONDS)
        delays[look % WINDOW] = max(0.0, time.perf_counter() - began - INTERVAL_SECONDS)
        look += 1
        LAG.set(max(delays))
