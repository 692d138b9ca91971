"""Worker replay: reads a running request's log from the worker that writes it.

The broker would have to search for the log's records among all others
(`streams/records/token_log_cache.py`).
"""

import time

from gateway.replies.log_cursor import LogCursor
from gateway.replies.log_subscription import LogSource
from streams import messages, subjects
from streams.broker.broker_client import Broker
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
        self, source: LogSource, cursor: LogCursor, max_bytes: int
    ) -> RecordPage | None:
        """Return a page of a log's records behind `cursor`, as the writing worker has them.

        None means that the caller must read from the broker: no worker writes the log, it did not
        answer within a second, or it has no further records. The page begins at `read_from_seq`,
        and `max_bytes` limits it roughly. Its `remaining` is always at least 1, so that the caller
        goes on until it has read the broker, which may have records that the worker lacks. The
        source's `subject` must be known. Raises `BrokerUnavailable`.
        """
        if source.writer_subject is None:
            source.writer_subject = await self._find_writer(source)
        if not source.writer_subject or self._is_silent(source.writer_subject):
            return None
        page = await self._request_page(source, cursor, source.writer_subject, max_bytes)
        if page is None or not page.remaining:
            source.writer_subject = ""
        return page._replace(remaining=max(1, page.remaining)) if page else None

    async def _find_writer(self, source: LogSource) -> str:
        """The subject at which to ask: that of the first attempt's worker, mostly the only one.

        Where the broker has dropped the first attempt's claim it is that of all workers. Empty if
        no worker has begun, or after `MAX_SEARCHES`.
        """
        source.writer_searches += 1
        if source.writer_searches > MAX_SEARCHES:
            return ""
        assert source.subject  # found by the caller
        query: dict[str, int | str] = {"next_by_subj": source.subject, "seq": 1}
        found = await self._broker.read(source.stream, query)
        first = messages.unpack_record(found[0].data) if found else {}
        if "index" in first:
            return subjects.WRITTEN_BY_ANY
        return subjects.written(first["worker"]) if "worker" in first else ""

    def _is_silent(self, writer: str) -> bool:
        return self._silent_until.get(writer, 0.0) > time.monotonic()

    async def _request_page(
        self, source: LogSource, cursor: LogCursor, writer: str, max_bytes: int
    ) -> RecordPage | None:
        question = RecordsQuery(
            source.tenant,
            source.request_id,
            cursor.read_from_seq,
            cursor.after_index,
            max_bytes,
        )
        began = time.monotonic()
        answer = await self._broker.request(writer, messages.pack(question), ANSWER_SECONDS)
        is_late = time.monotonic() - began >= ANSWER_SECONDS
        if answer is None and is_late and writer != subjects.WRITTEN_BY_ANY:
            self._silent_until[writer] = time.monotonic() + SILENT_SECONDS
        fields = messages.unpack(answer) if answer else None
        return RecordPage(*fields) if fields and fields[0] else None
