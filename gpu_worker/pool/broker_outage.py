"""When a worker is cut off from the broker: its acknowledgement waits run out, and others go on."""

import asyncio
import time

from streams.broker.connection import Broker

_CHECKS_PER_ACK_WAIT = 4  # in an ack wait


async def wait_until_cut_off(broker: Broker, ack_wait_seconds: float) -> None:
    """Returns when no server has answered for nearly two ack waits, never later than after two."""
    pause = ack_wait_seconds / _CHECKS_PER_ACK_WAIT
    most = 2 * (ack_wait_seconds - pause)  # the last look takes two pauses
    heard = time.monotonic()

    def hear() -> None:
        nonlocal heard
        heard = time.monotonic()

    broker.on_reconnect.append(hear)  # while the server that is lost is still waited for
    try:
        while time.monotonic() - heard < most:
            await asyncio.sleep(pause)
            if await broker.is_responsive(pause):
                hear()
    finally:
        broker.on_reconnect.remove(hear)
