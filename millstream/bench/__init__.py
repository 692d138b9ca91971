"""`millstream bench`: open- or closed-loop load over WebSocket or SSE, and what came of it.

settings → arrivals (when, how long) → load (sends, drains) → clients (websocket, sse)
         → samples → statistics → table, plot, JSON
"""

import asyncio

from millstream.bench.settings import BenchSettings


async def run(settings: BenchSettings, stop: asyncio.Event) -> int:
    """Put load on a gateway until it is spent or `stop` is set; 1 if no request was completed."""
    from millstream.bench.load_generator import (
        run,  # every command reads these settings, only bench needs this
    )

    return await run(settings, stop)
