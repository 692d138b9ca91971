"""Worker replay: reads a running request's log from the worker that writes it.

The broker would have to search for the log's records among all others
(`streams/records/token_log_cache.py`).
"""

import time

from gateway.replies.log_subscription import LogSubscription
from streams import messages, subjects
from streams.broker.connection import Broker
from streams.records.token_log_cache import RecordPage, RecordsQuery

ANSWER_SECONDS = 1.0  # the broker answers at once for a worker that is gone
SILENT_SECONDS = 2.0  # a worker that did not answer is not asked for so long
MAX_SEARCHES = 3  # by one reader: a fenced worker may go on to tell what the broker denies


class WorkerReplay:
    """Asks workers for the records that they have written to the token logs of running requests.

    One instance serves a gateway; it remembers which workers did not answer and skips them for
    `SILENT_SECONDS`.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._silent_until: dict[str, float] = {}  # by the subject at which a worker is asked

    async def fetch_page(
        self, subscription: LogSubscription, subject: str, max_bytes: int
    ) -> RecordPage | None:
        """Return a page of a log's records from `read_from_seq` on, as the writing worker has them.

        None means that the caller must read from the broker: no worker writes the log, it did not
        answer within a second, or it has no further records. `subject` is that of the log, and
        `max_bytes` limits the page roughly. The page's `remaining` is always at least 1, so that
        the caller goes on until it has read the broker, which may have records that the worker
        lacks. Raises `BrokerUnavailable`.
        """
        if subscription.writer_subject is None:
            subscription.writer_subject = await self._find_writer(subscription, subject)
        if not subscription.writer_subject or self._is_silent(subscription.writer_subject):
            return None
        page = await self._request_page(subscription, subscription.writer_subject, max_bytes)
        if page is None or not page.remaining:
            subscription.writer_subject = ""
        return page._replace(remaining=max(1, page.remaining)) if page else None

    async def _find_writer(self, subscription: LogSubscription, subject: str) -> str:
        """The subject at which to ask: that of the first attempt's worker, mostly the only one.

        Where the broker has dropped the first attempt's claim it is that of all workers. Empty if
        no worker has begun, or after `MAX_SEARCHES`.
        """
        subscription.writer_searches += 1
        if subscription.writer_searches > MAX_SEARCHES:
            return ""
        found = await self._broker.read(subscription.stream, {"next_by_subj": subject, "seq": 1})
        first = messages.unpack(found[0].data) if found else {}
        if "index" in first:
            return subjects.WRITTEN_BY_ANY
        return subjects.written(first["worker"]) if "worker" in first else ""

    def _is_silent(self, writer: str) -> bool:
        return self._silent_until.get(writer, 0.0) > time.monotonic()

    async def _request_page(
        self, subscription: LogSubscription, writer: str, max_bytes: int
    ) -> RecordPage | None:
        question = RecordsQuery(
            subscription.tenant,
            subscription.request_id,
            subscription.read_from_seq,
            subscription.after_index,
            max_bytes,
        )
        began = time.monotonic()
        answer = await self._broker.request(writer, messages.pack(question), ANSWER_SECONDS)
        is_late = time.monotonic() - began >= ANSWER_SECONDS
        if answer is None and is_late and writer != subjects.WRITTEN_BY_ANY:
            self._silent_until[writer] = time.monotonic() + SILENT_SECONDS
        fields = messages.unpack(answer) if answer else None
        return RecordPage(*fields) if fields and fields[0] else None
