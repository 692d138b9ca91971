"""Holds calls back until their group begins, and measures how long their answers take."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gpu_worker.engines.remote.item_groups import ItemGroups

Turn = asyncio.Future[None]


class GroupGate:
    """Lets calls begin by groups of items, on one event loop.

    `observe` gets the number of calls in each group that begins.
    """

    def __init__(self, size: int, max_seconds: float, observe: Callable[[int], None]) -> None:
        self._groups: ItemGroups[Turn] = ItemGroups(size, max_seconds)
        self._observe = observe
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, count: int, goal: float | None) -> AsyncIterator[None]:
        """Wait until the group begins that these `count` items are in; then run the block.

        `goal` is in monotonic seconds. The time of a block that raises is not measured.
        """
        await self._wait(count, goal)
        begun = time.monotonic()
        yield
        self._groups.times.add(time.monotonic() - begun)

    async def _wait(self, count: int, goal: float | None) -> None:
        turn: Turn = asyncio.get_running_loop().create_future()
        self._groups.add(turn, count, time.monotonic(), goal)
        self._release_due()
        try:
            await turn
        finally:
            self._groups.remove(turn)

    def _release_due(self) -> None:
        """Let the group begin if it is due; else come back when it is."""
        now = time.monotonic()
        if group := self._groups.pop_due(now):
            self._observe(len(group))
        for turn in group:
            if not turn.done():
                turn.set_result(None)
        if self._timer:
            self._timer.cancel()
        due = self._groups.due_at()
        loop = asyncio.get_running_loop()
        self._timer = None if due is None else loop.call_later(due - now, self._release_due)
