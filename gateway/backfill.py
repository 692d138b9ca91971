"""What followings have missed is read back from their token logs, as far as their sinks take it."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from gateway.following import Following, Stored
from gateway.outbound import LIMIT_BYTES
from streams.connection import Broker
from streams.errors import BrokerUnavailable

PAGE = 200  # records at most
READS_AT_ONCE = 16


class Backfill:
    """Who has to be read for, until `act` has done so.

    `wake` is called when there is somebody, `breaks` when a sink has failed, and `forget` for each
    that has come to its end.
    """

    def __init__(
        self,
        broker: Broker,
        wake: Callable[[], None],
        breaks: Callable[[Following, Exception], None],
        forget: Callable[[Following], Awaitable[None]],
    ) -> None:
        self._broker, self._wake = broker, wake
        self._breaks, self._forget = breaks, forget
        self._stale: set[Following] = set()

    def want(self, following: Following) -> None:
        """It has missed something, or may have. Idempotent."""
        self._stale.add(following)
        self._wake()

    async def act(self) -> None:
        """Read for all that want it, several at once. Raises `BrokerUnavailable` if some cannot be.

        What many clients resume after a gateway's death comes together.
        """
        unreadable: dict[str, str] = {}
        stale = iter(list(self._stale))

        async def catch_up() -> None:
            for following in stale:
                try:
                    if following.stream not in unreadable:
                        await self._catch_up(following)
                except BrokerUnavailable as error:
                    unreadable[following.stream] = str(error)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(len(self._stale), READS_AT_ONCE)):
                tasks.create_task(catch_up(), name="catch-up")
        if unreadable:
            raise BrokerUnavailable(f"logs cannot be read: {unreadable}")

    async def _catch_up(self, following: Following) -> None:
        """Read what the log holds behind the last record seen, as far as the sink takes it."""
        self._stale.discard(following)
        following.catching_up = True
        try:
            while await self._read_page(following):
                pass
            self._flow(following)
        except (BrokerUnavailable, asyncio.CancelledError):
            self._stale.add(following)
            raise
        except Exception as error:
            self._breaks(following, error)
        finally:
            following.catching_up, following.meanwhile = False, []
        if following.ended:
            await self._forget(following)

    def _flow(self, following: Following) -> None:
        """Take what came during the catch-up, and from now on what comes."""
        following.catching_up = False
        missed, following.meanwhile = following.meanwhile, []
        for reply in missed:
            if not following.offer(reply):
                self.want(following)

    async def _read_page(self, following: Following) -> bool:
        """Feed one page; True if there may be more that is wanted."""
        if following.paused or following.ended:
            return False
        before = following.last
        page, left = await self.page(following)
        wanted = following.read(page, time.monotonic())
        begins_anew = before > following.last
        return wanted and (begins_anew or left > 0)

    async def find(self, following: Following) -> str | None:
        """The subject of its log; None while there is no log. Raises `BrokerUnavailable`."""
        if following.subject is None:
            stream, pattern = following.stream, following.filter
            following.subject = await self._broker.find_subject(stream, pattern)
        return following.subject

    async def page(self, following: Following) -> tuple[list[Stored], int]:
        """The log from `read_from` on, as much as a reader takes, and how many records are left.

        The last record seen is the first of it, and not counted. Raises `BrokerUnavailable`.
        """
        if (subject := await self.find(following)) is None:
            return [], 0
        query: dict[str, int | str] = {
            "next_by_subj": subject,
            "seq": following.read_from,
            "batch": PAGE,
            "max_bytes": len(following.data) + LIMIT_BYTES,
        }
        page = await self._broker.read_page(following.stream, query)
        return [Stored(message.seq, message.data) for message in page.messages], page.left
