"""Whoever writes a log tells what it holds to those who begin to read it.

The broker would have to search for it among all others (`streams/records/token_log_cache.py`).
"""

import time

from gateway.replies.log_subscription import LogSubscription
from streams import messages, subjects
from streams.broker.connection import Broker
from streams.records.token_log_cache import RecordPage, RecordsQuery

ANSWER_SECONDS = 1.0  # the broker answers at once for a worker that is gone
SILENT_SECONDS = 2.0  # so long one that did not answer is not asked
MAX_SEARCHES = 3  # by one reader: a worker that was overtaken may tell what the broker denies


class WorkerReplay:
    """Asks workers for their logs."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._silent_until: dict[str, float] = {}  # whom, until when

    async def fetch_page(
        self, following: LogSubscription, subject: str, most_bytes: int
    ) -> RecordPage | None:
        """From its `read_from` on; None if it is to be read from the broker.

        Something is always left: the broker has the last word. It may have stored what its writer
        does not know yet, or what another one has written. Raises `BrokerUnavailable`.
        """
        if following.writer_subject is None:
            following.writer_subject = await self._find_writer(following, subject)
        if not following.writer_subject or self._is_silent(following.writer_subject):
            return None
        page = await self._request_page(following, following.writer_subject, most_bytes)
        if page is None or not page.remaining:
            following.writer_subject = ""
        return page._replace(remaining=max(1, page.remaining)) if page else None

    async def _find_writer(self, following: LogSubscription, subject: str) -> str:
        """Where to ask: the worker of the first attempt, which is the only one of most.

        All of them, where the broker has dropped its claim. Empty if no worker has begun.
        """
        following.writer_searches += 1
        if following.writer_searches > MAX_SEARCHES:
            return ""
        found = await self._broker.read(following.stream, {"next_by_subj": subject, "seq": 1})
        first = messages.unpack(found[0].data) if found else {}
        if "index" in first:
            return subjects.WRITTEN_BY_ANY
        return subjects.written(first["worker"]) if "worker" in first else ""

    def _is_silent(self, writer: str) -> bool:
        return self._silent_until.get(writer, 0.0) > time.monotonic()

    async def _request_page(
        self, following: LogSubscription, writer: str, most_bytes: int
    ) -> RecordPage | None:
        question = RecordsQuery(
            following.tenant,
            following.request_id,
            following.read_from_seq,
            following.after_index,
            most_bytes,
        )
        began = time.monotonic()
        answer = await self._broker.request(writer, messages.pack(question), ANSWER_SECONDS)
        is_late = time.monotonic() - began >= ANSWER_SECONDS
        if answer is None and is_late and writer != subjects.WRITTEN_BY_ANY:
            self._silent_until[writer] = time.monotonic() + SILENT_SECONDS
        told = messages.unpack(answer) if answer else None
        return RecordPage(*told) if told and told[0] else None
