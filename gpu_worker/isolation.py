"""When a worker is cut off from the broker: its acknowledgement waits run out, and others go on."""

import asyncio
import time

from streams.connection import Broker

_LOOKS = 4  # in an ack wait


async def cut_off(broker: Broker, ack_wait_seconds: float) -> None:
    """Returns when no server has answered for nearly two ack waits, never later than after two."""
    pause = ack_wait_seconds / _LOOKS
    most = 2 * (ack_wait_seconds - pause)  # the last look takes two pauses
    heard = time.monotonic()
    while time.monotonic() - heard < most:
        await asyncio.sleep(pause)
        if await broker.answers(pause):
            heard = time.monotonic()
