"""Whoever writes a log tells what it holds to those who begin to read it.

The broker would have to search for it among all others (`streams/written.py`).
"""

import time

from gateway.following import Following
from streams import messages, subjects
from streams.connection import Broker
from streams.written import Page, Question

ANSWER_SECONDS = 1.0  # the broker answers at once for a worker that is gone
SILENT_SECONDS = 2.0  # so long one that did not answer is not asked
MOST_SEARCHES = 3  # by one reader: a worker that was overtaken may tell what the broker denies


class Writers:
    """Asks workers for their logs."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._silent: dict[str, float] = {}  # whom, until when

    async def page(self, following: Following, subject: str, most_bytes: int) -> Page | None:
        """From its `read_from` on; None if it is to be read from the broker.

        Something is always left: the broker has the last word. It may have stored what its writer
        does not know yet, or what another one has written. Raises `BrokerUnavailable`.
        """
        if following.writer is None:
            following.writer = await self._find(following, subject)
        if not following.writer or self._is_silent(following.writer):
            return None
        page = await self._ask(following, following.writer, most_bytes)
        if page is None or not page.left:
            following.writer = ""
        return page._replace(left=max(1, page.left)) if page else None

    async def _find(self, following: Following, subject: str) -> str:
        """Where to ask: the worker of the first attempt, which is the only one of most.

        All of them, where the broker has dropped its claim. Empty if no worker has begun.
        """
        following.searches += 1
        if following.searches > MOST_SEARCHES:
            return ""
        found = await self._broker.read(following.stream, {"next_by_subj": subject, "seq": 1})
        first = messages.unpack(found[0].data) if found else {}
        if "index" in first:
            return subjects.WRITTEN_BY_ANY
        return subjects.written(first["worker"]) if "worker" in first else ""

    def _is_silent(self, writer: str) -> bool:
        return self._silent.get(writer, 0.0) > time.monotonic()

    async def _ask(self, following: Following, writer: str, most_bytes: int) -> Page | None:
        question = Question(
            following.tenant,
            following.request_id,
            following.read_from,
            following.after,
            most_bytes,
        )
        began = time.monotonic()
        answer = await self._broker.request(writer, messages.pack(question), ANSWER_SECONDS)
        is_late = time.monotonic() - began >= ANSWER_SECONDS
        if answer is None and is_late and writer != subjects.WRITTEN_BY_ANY:
            self._silent[writer] = time.monotonic() + SILENT_SECONDS
        told = messages.unpack(answer) if answer else None
        return Page(*told) if told and told[0] else None
