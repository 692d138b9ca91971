"""The reply subject of one process, and the responses from the broker that it waits for."""

import asyncio
import itertools
import secrets
from math import inf
from typing import Any

from streams.broker.responses import PendingResponse
from streams.errors import BrokerUnavailable, MillstreamError

REPEAT_SECONDS = 0.6  # a question may have been lost with a leader that died: ask again


class Inbox:
    """The reply subjects of one connection, and the broker's responses that are still awaited.

    Each question gets a reply subject of its own. A response that has not come after `seconds`
    fails with `BrokerUnavailable`; until then its question is sent again every `REPEAT_SECONDS`, if
    the question allows that. All wait equally long, so one timer for the oldest serves all: a
    timeout for each would take 3.4 µs of the 20 µs of an append.
    """

    def __init__(self, seconds: float) -> None:
        prefix = f"_INBOX.{secrets.token_hex(11)}."
        self.subject = f"{prefix}*"
        self._prefix, self._seconds = prefix, seconds
        self._ids = itertools.count()
        # By reply subject, with the deadline; the earliest deadline comes first.
        self._pending: dict[str, tuple[float, PendingResponse[Any]]] = {}
        self._is_check_scheduled = False

    def __len__(self) -> int:
        return len(self._pending)

    def expect(self, response: PendingResponse[Any]) -> str:
        """Register an awaited response and return the reply subject for its question.

        Returns at once; await the response's `future`. Call `discard` with the subject at the end.
        """
        subject = f"{self._prefix}{next(self._ids):x}"
        now = asyncio.get_running_loop().time()
        self._pending[subject] = now + self._seconds, response
        if not self._is_check_scheduled:
            self._schedule_check(now + min(self._seconds, REPEAT_SECONDS))
        return subject

    def discard(self, subject: str) -> None:
        """Forget the response awaited on a reply subject; raises KeyError if there is none."""
        del self._pending[subject]

    def receive(self, subject: bytes, data: bytes, headers: bytes) -> None:
        """Pass a message to the response awaited on its subject; if there is none, drop it."""
        if entry := self._pending.get(subject.decode()):
            entry[1].receive(data, headers)

    def fail(self, error: MillstreamError) -> None:
        """End all responses that are still awaited with `error`."""
        for _, response in self._pending.values():
            response.fail(error)

    def _schedule_check(self, at: float) -> None:
        self._is_check_scheduled = True
        asyncio.get_running_loop().call_at(at, self._check_deadlines)

    def _check_deadlines(self) -> None:
        """Fail responses past their deadline, repeat old questions, schedule the next check."""
        self._is_check_scheduled = False
        now, first = asyncio.get_running_loop().time(), inf
        for due, response in list(self._pending.values()):
            if due <= now:
                response.fail(BrokerUnavailable(f"NATS did not answer in {self._seconds:g} s"))
                continue
            first = min(first, due)
            if due - self._seconds + REPEAT_SECONDS <= now:
                response.repeat()
        if first < inf:
            self._schedule_check(min(first, now + REPEAT_SECONDS))
