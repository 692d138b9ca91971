"""A metric of how late the event loop runs its timers; no code may block it for more than 5 ms."""

import asyncio
import time

from prometheus_client import Gauge

INTERVAL_SECONDS = 0.25  # ten measurements a second were a quarter of an idle worker's CPU time
WINDOW = 20  # measurements

LAG = Gauge("millstream_event_loop_lag_seconds", "The longest delay of a timer, last 5 seconds.")


async def measure_lag() -> None:
    """Measure about four times a second how late the event loop runs a timer; never returns.

    After each measurement the Prometheus gauge `LAG` is set to the longest delay among the last 20,
    which are about 5 seconds' worth. The delay is in seconds. Runs until cancelled.
    """
    delays = [0.0] * WINDOW
    count = 0
    while True:
        began = time.perf_counter()
        await asyncio.sleep(INTERVAL_SECONDS)
        delays[count % WINDOW] = max(0.0, time.perf_counter() - began - INTERVAL_SECONDS)
        count += 1
        LAG.set(max(delays))
