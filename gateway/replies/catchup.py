"""Catch-up: reads what log subscriptions have missed from their token logs, for their sinks."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from gateway.replies.log_subscription import LogSource, LogSubscription, StoredRecord
from gateway.replies.send_buffer import LIMIT_BYTES
from gateway.replies.worker_replay import WorkerReplay
from streams import topology
from streams.broker.broker_client import Broker
from streams.broker.retry import retry_forever
from streams.errors import BrokerUnavailable
from streams.records.token_log import read_log_begin
from streams.records.token_log_cache import MAX_PAGE_RECORDS

MAX_CONCURRENT_READS = 16  # of each stream: one that cannot be read does not hold up the others


class Catchup:
    """Reads the records that log subscriptions have missed, and passes them to their sinks.

    One instance serves a gateway, and reads only while `run` runs. `on_sink_failure` is called when
    a subscription's sink has raised an error, and `unsubscribe` is awaited for each subscription
    whose last record was passed on.
    """

    def __init__(
        self,
        broker: Broker,
        shards: int,
        on_sink_failure: Callable[[LogSubscription, Exception], None],
        unsubscribe: Callable[[LogSubscription], Awaitable[None]],
    ) -> None:
        self._broker = broker
        self._on_sink_failure, self._unsubscribe = on_sink_failure, unsubscribe
        self._worker_replay = WorkerReplay(broker)
        self._queues: dict[str, asyncio.Queue[LogSubscription]] = {
            topology.token_stream_name(shard): asyncio.Queue() for shard in range(shards)
        }
        self._stale: set[LogSubscription] = set()
        self._reading: set[LogSubscription] = set()

    def schedule(self, subscription: LogSubscription) -> None:
        """Have `run` read a subscription's log, since it may have missed records; return at once.

        Does nothing if a read is scheduled that has not begun.
        """
        if subscription not in self._stale:
            self._stale.add(subscription)
            self._enqueue(subscription)

    async def run(self) -> None:
        """Read the logs of scheduled subscriptions until cancelled, at most 16 at once per stream.

        The bound is for the time after a gateway's death, when many clients resume at once. While
        the broker does not answer, a read is tried again and again.
        """
        async with asyncio.TaskGroup() as tasks:
            for queue in self._queues.values():
                for _ in range(MAX_CONCURRENT_READS):
                    tasks.create_task(self._run_reader(queue), name="catchup")

    def _enqueue(self, subscription: LogSubscription) -> None:
        """Queue a stale subscription, unless it is being read: two reads would mix its records."""
        if subscription in self._stale and subscription not in self._reading:
            self._queues[subscription.source.stream].put_nowait(subscription)

    async def _run_reader(self, queue: asyncio.Queue[LogSubscription]) -> None:
        while True:
            subscription = await queue.get()
            self._stale.discard(subscription)
            self._reading.add(subscription)
            await retry_forever(partial(self._catch_up, subscription))
            self._reading.discard(subscription)
            self._enqueue(subscription)

    async def _catch_up(self, subscription: LogSubscription) -> None:
        """Read what the log holds behind the last record seen, as far as the sink takes it."""
        subscription.begin_reading()
        try:
            while await self._feed_page(subscription):
                pass
            if not subscription.finish_reading():
                self.schedule(subscription)
        except BrokerUnavailable:
            subscription.abort_reading()
            raise
        except Exception as error:
            self._on_sink_failure(subscription, error)
        if subscription.is_ended:
            await self._unsubscribe(subscription)

    async def _feed_page(self, subscription: LogSubscription) -> bool:
        """Feed one page; True if the sink wants more and there may be more."""
        if not subscription.takes_records:
            return False
        seq_before = subscription.cursor.last_seq
        page, remaining = await self.fetch_page(subscription)
        wants_more = subscription.consume_page(page, time.monotonic())
        is_restarted = seq_before > subscription.cursor.last_seq
        return wants_more and (is_restarted or remaining > 0)

    async def find_log(self, source: LogSource) -> str | None:
        """Return the NATS subject of a token log; None while there is no log.

        The broker is asked until the log exists; then the subject is remembered. Raises
        `BrokerUnavailable`.
        """
        if source.subject is None:
            source.subject = await self._broker.find_subject(source.stream, source.subject_filter)
        return source.subject

    async def fetch_page(self, subscription: LogSubscription) -> tuple[list[StoredRecord], int]:
        """Return the log's records from the cursor on, and how many are left after these.

        The page begins with the record that was taken last, if the log still has it, and holds
        about as many bytes after that record as a reader may buffer. The page is empty while there
        is no log. The worker that writes the log is asked first, and then the broker. Raises
        `BrokerUnavailable`.
        """
        source, cursor = subscription.source, subscription.cursor
        if (subject := await self.find_log(source)) is None:
            return [], 0
        max_bytes = len(cursor.last_data) + LIMIT_BYTES
        if replayed := await self._worker_replay.fetch_page(source, cursor, max_bytes):
            return [StoredRecord(*record) for record in replayed.records], replayed.remaining
        query: dict[str, int | str] = {
            "next_by_subj": subject,
            "seq": cursor.read_from_seq,
            "batch": MAX_PAGE_RECORDS,
            "max_bytes": max_bytes,
        }
        if cursor.last_seq:
            page = await self._broker.read_page(source.stream, query)
        else:
            page = await read_log_begin(self._broker, source.stream, query)
        found = [StoredRecord(message.seq, message.data) for message in page.messages]
        return found, page.remaining
