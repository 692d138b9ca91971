"""Detects that a worker is cut off from the broker, so that others may have its work by now."""

import asyncio
import time

from streams.broker.broker_client import Broker

_CHECKS_PER_ACK_WAIT = 4


async def wait_until_cut_off(broker: Broker, ack_wait_seconds: float) -> None:
    """Wait until no server has answered for nearly two ack waits, and return before two are over.

    Does not return while servers answer: they are asked about four times in each ack wait. A
    reconnect counts as an answer. Nothing is raised.
    """
    pause = ack_wait_seconds / _CHECKS_PER_ACK_WAIT
    max_silence = 2 * (ack_wait_seconds - pause)  # the last check takes two pauses
    responded_at = time.monotonic()

    def record_response() -> None:
        nonlocal responded_at
        responded_at = time.monotonic()

    # A reconnect counts at once, even while a check still waits for the server that was lost
    broker.on_reconnect.append(record_response)
    try:
        while time.monotonic() - responded_at < max_silence:
            await asyncio.sleep(pause)
            if await broker.is_responsive(pause):
                record_response()
    finally:
        broker.on_reconnect.remove(record_response)
