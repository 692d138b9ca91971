"""Passes on signals that were heard, and ignores what is none."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

import structlog
from nats.aio.msg import Msg

from streams import subjects, topology
from streams.signals import InvalidSignal

log = structlog.get_logger()

T = TypeVar("T")

LOG_SECONDS = 1.0  # between two events: whoever sends nonsense may send much of it
_MAX_SUBJECT_CHARACTERS = 200
_STREAM_HEADER, _SUBJECT_HEADER = "Nats-Stream", "Nats-Subject"  # on each message that was copied
_STATUS_HEADER = "Status"  # on the broker's own answers, such as 404


def check_heard(subject: str, headers: Mapping[str, str]) -> None:
    """Raise `InvalidSignal` unless the broker has copied this message from the stream SIGNALS.

    `subject` is where it was heard. Of a header that is there twice, the broker's own comes last,
    and `headers` must have the last one.
    """
    if headers.get(_STREAM_HEADER) != topology.SIGNALS or _STATUS_HEADER in headers:
        raise InvalidSignal(f"it does not come from the stream {topology.SIGNALS}")
    if subjects.heard(headers.get(_SUBJECT_HEADER, "")) != subject:
        raise InvalidSignal("it was stored on another subject")


class SignalHandler(Generic[T]):
    """Handler of the messages on one subject or filter (`subjects.heard`); `act` does what is due.

    `parse` gets a signal's subject and body, and raises `InvalidSignal` if it is none; `act` gets
    its result. Messages that are no signals are logged as `signal_ignored`, at most once in
    `LOG_SECONDS`, with the number of those ignored since the last such event.
    """

    def __init__(
        self, parse: Callable[[str, bytes], T], act: Callable[[T], Awaitable[None]]
    ) -> None:
        self._parse, self._act = parse, act
        self._ignored = 0
        self._next_log_at = 0.0  # monotonic seconds

    async def receive(self, msg: Msg) -> None:
        """Act on a message if it is a signal; subscribe with this."""
        try:
            check_heard(msg.subject, msg.headers or {})
            signal = self._parse(msg.subject, msg.data)
        except InvalidSignal as error:
            self._ignore(msg.subject, str(error))
        else:
            await self._act(signal)

    def _ignore(self, subject: str, reason: str) -> None:
        self._ignored += 1
        if time.monotonic() >= self._next_log_at:
            self._next_log_at = time.monotonic() + LOG_SECONDS
            subject = subject[:_MAX_SUBJECT_CHARACTERS]
            log.warning("signal_ignored", subject=subject, reason=reason, count=self._ignored)
            self._ignored = 0
