"""Keeping a connection's `SharedClock` right by looks at the brokers' clock.

The leader of the requests is asked, by everybody: so brokers may disagree, and services do not.
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import structlog

from streams.clock import STEP_SECONDS
from streams.errors import BrokerUnavailable
from streams.patience import answered_within, persistently

if TYPE_CHECKING:
    from streams.connection import Broker

log = structlog.get_logger()

SET_SECONDS = 20.0
LOOK_SECONDS = 10.0
DOUBT_SECONDS = 1.0  # while looks tell of quite another time


async def set_clock(broker: "Broker") -> None:
    """Know the time before serving. Raises `BrokerUnavailable` if nobody tells it for long."""
    async with answered_within(SET_SECONDS):
        await persistently(partial(look, broker))


async def look(broker: "Broker") -> None:
    """Look at the brokers' clock once. Raises `BrokerUnavailable`, also where no stream is."""
    moved = broker.clock.hear(await broker.look_at_clock())
    if abs(moved) > STEP_SECONDS:
        log.warning("clock_moved", seconds=round(moved, 3))
    elif broker.clock.is_doubted:
        log.warning("clock_doubted")


async def keep(broker: "Broker") -> None:
    """Look now and then, until cancelled; a broker that does not answer is asked later."""
    while True:
        await asyncio.sleep(DOUBT_SECONDS if broker.clock.is_doubted else LOOK_SECONDS)
        try:
            await look(broker)
        except BrokerUnavailable:
            continue  # what passes meanwhile is measured here
