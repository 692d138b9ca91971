"""What is heavy is carried beside the event loop.

To decode and check 1 MB took up to 180 ms of the loop. Most of it runs Python, so from a thread it
gives way to the loop every few ms; what is one call into C is bounded in `schemas.bulk`.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
OFFLOAD_BYTES = 32_768  # some 3 ms of work at worst; a hop to a thread and back takes 0.08


class OffloadThread:
    """One thread: more would take more turns from the loop, and do no more work. `close` it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="porter")

    async def run(self, size: int, act: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """What `act` returns or raises, called here unless it has to do with many bytes.

        Cancelled, the act may go on; nobody learns what came of it.
        """
        if size < OFFLOAD_BYTES:
            return act(*args, **named)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: act(*args, **named))

    def close(self) -> None:
        """Let go of the thread. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
