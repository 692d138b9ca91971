"""What followings have missed is read back from their token logs, as far as their sinks take it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from gateway.following import Following, Stored
from gateway.outbound import LIMIT_BYTES
from gateway.writers import Writers
from streams import topology
from streams.connection import Broker
from streams.errors import BrokerUnavailable
from streams.patience import persistently
from streams.written import MOST_RECORDS

READS_AT_ONCE = 16  # of one stream: where it cannot be read, others can


class Backfill:
    """Reads for who wants it, as long as `run` runs.

    `breaks` is called when a sink has failed, and `forget` for each that has come to its end.
    """

    def __init__(
        self,
        broker: Broker,
        shards: int,
        breaks: Callable[[Following, Exception], None],
        forget: Callable[[Following], Awaitable[None]],
    ) -> None:
        self._broker, self._breaks, self._forget = broker, breaks, forget
        self._writers = Writers(broker)
        self._queues: dict[str, asyncio.Queue[Following]] = {
            topology.tokens(shard): asyncio.Queue() for shard in range(shards)
        }
        self._stale: set[Following] = set()
        self._being_read: set[Following] = set()

    def want(self, following: Following) -> None:
        """It has missed something, or may have. Idempotent."""
        if following not in self._stale:
            self._stale.add(following)
            self._put(following)

    async def run(self) -> None:
        """Read until cancelled.

        What many clients resume after a gateway's death comes together.
        """
        async with asyncio.TaskGroup() as tasks:
            for queue in self._queues.values():
                for _ in range(READS_AT_ONCE):
                    tasks.create_task(self._read_each(queue), name="backfill")

    def _put(self, following: Following) -> None:
        """Have it read once more, but never by two at a time."""
        if following in self._stale and following not in self._being_read:
            self._queues[following.stream].put_nowait(following)

    async def _read_each(self, queue: asyncio.Queue[Following]) -> None:
        while True:
            following = await queue.get()
            self._stale.discard(following)
            self._being_read.add(following)
            await persistently(partial(self._catch_up, following))
            self._being_read.discard(following)
            self._put(following)

    async def _catch_up(self, following: Following) -> None:
        """Read what the log holds behind the last record seen, as far as the sink takes it."""
        following.catching_up = True
        try:
            while await self._read_page(following):
                pass
            self._flow(following)
        except BrokerUnavailable:
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
            if not following.offer(*reply):
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
        most_bytes = len(following.data) + LIMIT_BYTES
        if told := await self._writers.page(following, subject, most_bytes):
            return [Stored(*record) for record in told.records], told.left
        query: dict[str, int | str] = {
            "next_by_subj": subject,
            "seq": following.read_from,
            "batch": MOST_RECORDS,
            "max_bytes": most_bytes,
        }
        page = await self._broker.read_page(following.stream, query)
        return [Stored(message.seq, message.data) for message in page.messages], page.left
