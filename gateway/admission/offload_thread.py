"""Runs CPU-heavy work in a thread so that it does not block the event loop.

Decoding and checking 1 MB took up to 180 ms of the loop. Most of it is Python code, so from a
thread it gives way to the loop every few ms; single calls into C, which do not, are bounded in
`api/schemas/payload_element_limit.py`.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
OFFLOAD_BYTES = 32_768  # some 3 ms of work at worst; a hop to a thread and back takes 0.08


class OffloadThread:
    """One thread for CPU-heavy work. The owner must call `close` at the end.

    More threads would take more of Python's lock from the event loop and get no more work done.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="offload")

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Call `function` with the arguments; return its result or raise its error.

        `size` is the number of bytes that the call works on. Below `OFFLOAD_BYTES` the call is made
        on the event loop, else in the thread, after the calls that wait there. Cancelling stops the
        wait; a call that has begun goes on to its end, and its result is dropped.
        """
        if size < OFFLOAD_BYTES:
            return function(*args, **named)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **named))

    def close(self) -> None:
        """Stop the thread and return at once. Idempotent.

        A call that has begun goes on to its end; calls that have not begun are cancelled.
        """
        self._executor.shutdown(wait=False, cancel_futures=True)
