"""What followings have missed is read back from their token logs, as far as their sinks take it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from gateway.replies.log_subscription import LogSubscription, StoredRecord
from gateway.replies.send_buffer import LIMIT_BYTES
from gateway.replies.worker_replay import WorkerReplay
from streams import topology
from streams.broker.connection import Broker
from streams.broker.retry import retry_forever
from streams.errors import BrokerUnavailable
from streams.records.token_log_cache import MAX_PAGE_RECORDS

MAX_CONCURRENT_READS = 16  # of one stream: where it cannot be read, others can


class Catchup:
    """Reads for who wants it, as long as `run` runs.

    `breaks` is called when a sink has failed, and `forget` for each that has come to its end.
    """

    def __init__(
        self,
        broker: Broker,
        shards: int,
        breaks: Callable[[LogSubscription, Exception], None],
        forget: Callable[[LogSubscription], Awaitable[None]],
    ) -> None:
        self._broker, self._on_sink_failure, self._unsubscribe = broker, breaks, forget
        self._worker_replay = WorkerReplay(broker)
        self._queues: dict[str, asyncio.Queue[LogSubscription]] = {
            topology.token_stream_name(shard): asyncio.Queue() for shard in range(shards)
        }
        self._stale: set[LogSubscription] = set()
        self._reading: set[LogSubscription] = set()

    def schedule(self, following: LogSubscription) -> None:
        """It has missed something, or may have. Idempotent."""
        if following not in self._stale:
            self._stale.add(following)
            self._enqueue(following)

    async def run(self) -> None:
        """Read until cancelled.

        What many clients resume after a gateway's death comes together.
        """
        async with asyncio.TaskGroup() as tasks:
            for queue in self._queues.values():
                for _ in range(MAX_CONCURRENT_READS):
                    tasks.create_task(self._run_reader(queue), name="backfill")

    def _enqueue(self, following: LogSubscription) -> None:
        """Have it read once more, but never by two at a time."""
        if following in self._stale and following not in self._reading:
            self._queues[following.stream].put_nowait(following)

    async def _run_reader(self, queue: asyncio.Queue[LogSubscription]) -> None:
        while True:
            following = await queue.get()
            self._stale.discard(following)
            self._reading.add(following)
            await retry_forever(partial(self._catch_up, following))
            self._reading.discard(following)
            self._enqueue(following)

    async def _catch_up(self, following: LogSubscription) -> None:
        """Read what the log holds behind the last record seen, as far as the sink takes it."""
        following.is_catching_up = True
        try:
            while await self._feed_page(following):
                pass
            self._resume_live(following)
        except BrokerUnavailable:
            raise
        except Exception as error:
            self._on_sink_failure(following, error)
        finally:
            following.is_catching_up, following.deferred_replies = False, []
        if following.is_ended:
            await self._unsubscribe(following)

    def _resume_live(self, following: LogSubscription) -> None:
        """Take what came during the catch-up, and from now on what comes."""
        following.is_catching_up = False
        missed, following.deferred_replies = following.deferred_replies, []
        for reply in missed:
            if not following.receive_reply(*reply):
                self.schedule(following)

    async def _feed_page(self, following: LogSubscription) -> bool:
        """Feed one page; True if there may be more that is wanted."""
        if following.is_paused or following.is_ended:
            return False
        before = following.last_seq
        page, left = await self.fetch_page(following)
        wanted = following.consume_page(page, time.monotonic())
        begins_anew = before > following.last_seq
        return wanted and (begins_anew or left > 0)

    async def find_log(self, following: LogSubscription) -> str | None:
        """The subject of its log; None while there is no log. Raises `BrokerUnavailable`."""
        if following.subject is None:
            stream, pattern = following.stream, following.subject_filter
            following.subject = await self._broker.find_subject(stream, pattern)
        return following.subject

    async def fetch_page(self, following: LogSubscription) -> tuple[list[StoredRecord], int]:
        """The log from `read_from` on, as much as a reader takes, and how many records are left.

        The last record seen is the first of it, and not counted. Raises `BrokerUnavailable`.
        """
        if (subject := await self.find_log(following)) is None:
            return [], 0
        most_bytes = len(following.last_data) + LIMIT_BYTES
        if told := await self._worker_replay.fetch_page(following, subject, most_bytes):
            return [StoredRecord(*record) for record in told.records], told.remaining
        query: dict[str, int | str] = {
            "next_by_subj": subject,
            "seq": following.read_from_seq,
            "batch": MAX_PAGE_RECORDS,
            "max_bytes": most_bytes,
        }
        page = await self._broker.read_page(following.stream, query)
        return [
            StoredRecord(message.seq, message.data) for message in page.messages
        ], page.remaining
