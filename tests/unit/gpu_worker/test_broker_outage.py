"""When a worker takes itself for cut off from the brokers."""

import asyncio
from collections.abc import Callable
from typing import cast

from gpu_worker.pool.broker_outage import wait_until_cut_off
from streams.broker.broker_client import Broker

ACK_WAIT_SECONDS = 0.4
LOOKS = 6  # twice as many as it takes to be cut off


class Reconnecting:
    """A connection that is lost and found while an answer is waited for, each time."""

    def __init__(self) -> None:
        self.on_reconnect: list[Callable[[], None]] = []
        self.looks = 0
        self.looked = asyncio.Event()

    async def is_responsive(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        for callback in self.on_reconnect:
            callback()
        self.looks += 1
        if self.looks == LOOKS:
            self.looked.set()
        return False


async def test_a_worker_that_has_found_another_broker_is_not_cut_off() -> None:
    """It lets go of all that it holds, also of what the new one has just given it."""
    broker = Reconnecting()
    watch = asyncio.create_task(wait_until_cut_off(cast(Broker, broker), ACK_WAIT_SECONDS))
    looked = asyncio.create_task(broker.looked.wait())
    ended, _ = await asyncio.wait({watch, looked}, return_when=asyncio.FIRST_COMPLETED)
    assert ended == {looked}
    watch.cancel()
    await asyncio.wait({watch})
    assert not broker.on_reconnect
