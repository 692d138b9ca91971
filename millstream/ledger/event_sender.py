"""Event sender: posts the requests in a directory's segments to a meter, as CloudEvents.

What the meter has confirmed is a file beside the segments, written anew after each batch. A batch
that was posted before a kill is posted again; the meter knows the events by their ids.
"""

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, build_opener

import structlog
from prometheus_client import Counter

from millstream.connection_failures import describe_failure
from millstream.http_redirects import NoRedirects
from millstream.ledger import cloud_events
from millstream.ledger.segments import Line, list_segments, sync_directory
from millstream.up.file_lock import try_lock
from streams.errors import MillstreamError

log = structlog.get_logger()

POLL_SECONDS = 1.0
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 60.0
POST_SECONDS = 10.0  # a meter that has not answered by then hangs
BATCH_EVENTS = 100
_QUOTED_BYTES = 300
_WAIT = "the same events are sent again until a meter takes them"
_RETRIED = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_EARLY,
    HTTPStatus.TOO_MANY_REQUESTS,
}

SENT = Counter("millstream_ledger_events_sent_total", "Events that the meter has confirmed.")
FAILED = Counter("millstream_ledger_send_failures_total", "Posts that failed and are repeated.")


class EventsRefused(MillstreamError):
    """The meter refuses events, and sending them again would not help; nothing of it is skipped."""


class SenderRuns(MillstreamError):
    """Another process sends the same directory to the same meter."""


class _SinkUnavailable(Exception):
    """The meter did not answer, or cannot take events just now; `remedy` says what helps."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True)
class Sink:
    """A meter that takes CloudEvents over HTTP, at `url`; `token` is sent as a bearer token.

    `cell` is the source that events name.
    """

    url: str
    cell: str
    token: str = ""

    def post(self, lines: list[Line]) -> None:
        """Post the events of these lines; blocks until they are confirmed by a status of 2xx.

        Raises `EventsRefused`, or `_SinkUnavailable` where it may help to try again.
        """
        headers = {"Content-Type": cloud_events.CONTENT_TYPE}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        body = cloud_events.encode_batch(lines, self.cell)
        try:
            with _OPENER.open(Request(self.url, body, headers), timeout=POST_SECONDS):
                return
        except HTTPError as error:
            with error:
                answer = error.read(_QUOTED_BYTES).decode(errors="replace")
            reason = f"{error.code} {error.reason}: {answer}"
            if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code in _RETRIED:
                raise _SinkUnavailable(f"the meter answers {reason}", _WAIT) from None
            raise EventsRefused(
                f"the meter refuses the events of the ledger's sequences {lines[0]['seq']} to "
                f"{lines[-1]['seq']} with {reason}; correct the cause and start again, they are "
                "sent then"
            ) from None
        except (HTTPException, OSError) as error:
            where = urlsplit(self.url)
            raise _SinkUnavailable(
                f"no meter answers at {where.scheme}://{where.netloc} ({describe_failure(error)})",
                f"start it, or name another one with --to; {_WAIT}",
            ) from None


_OPENER = build_opener(NoRedirects)


class SentCursor:
    """Cursor of the events that a meter has confirmed, per directory; one process may hold it.

    Raises `SenderRuns` if another one does.
    """

    def __init__(self, directory: Path, url: str) -> None:
        name = f"sent-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
        self._directory, self._path = directory, directory / f"{name}.json"
        self._lock = (directory / f".{name}.lock").open("w")
        if not try_lock(self._lock):
            self._lock.close()
            raise SenderRuns(f"another process sends {directory} to the same meter")
        self.seq = 0
        if self._path.exists():
            self.seq = json.loads(self._path.read_text())["seq"]

    def advance(self, seq: int) -> None:
        """Note that all events up to this sequence of the ledger are confirmed; durably."""
        fresh = self._path.with_suffix(".new")
        with fresh.open("w") as file:
            json.dump({"seq": seq}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._path)
        sync_directory(self._directory)
        self.seq = seq

    def close(self) -> None:
        """Let another process have it."""
        self._lock.close()


class EventSender:
    """Posts a directory's requests to a meter, in order and each at least once."""

    def __init__(self, directory: Path, sink: Sink, cursor: SentCursor) -> None:
        self._directory, self._sink, self._cursor = directory, sink, cursor

    async def run(self, stop: asyncio.Event, *, once: bool) -> None:
        """Send until `stop` is set, or with `once` until all segments of now are sent.

        While the meter does not answer, or answers 5xx, 408, 425 or 429, the same events are sent
        again, after pauses that grow to a minute. Raises `EventsRefused` for any other status, and
        `SegmentsDamaged`.
        """
        while not stop.is_set():
            await self._send_segments(stop)
            if once:
                return
            await _wait(stop, POLL_SECONDS)

    async def _send_segments(self, stop: asyncio.Event) -> None:
        for segment in list_segments(self._directory):
            if segment.last <= self._cursor.seq:
                continue
            await asyncio.to_thread(segment.verify)
            requests = (r for r in segment.read(self._cursor.seq) if r["type"] == "request")
            for batch in _batches(requests):
                if not await self._send(batch, stop):
                    return
                self._cursor.advance(batch[-1]["seq"])
            self._cursor.advance(segment.last)

    async def _send(self, batch: list[Line], stop: asyncio.Event) -> bool:
        """Send one batch until it is confirmed; False if `stop` was set before."""
        pause = FIRST_PAUSE_SECONDS
        while not stop.is_set():
            try:
                await asyncio.to_thread(self._sink.post, batch)
            except _SinkUnavailable as error:
                FAILED.inc()
                log.warning(
                    "events_not_sent",
                    first=batch[0]["seq"],
                    reason=str(error),
                    remedy=error.remedy,
                )
                await _wait(stop, pause * random.uniform(0.8, 1.2))
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
            else:
                SENT.inc(len(batch))
                return True
        return False


def _batches(lines: Iterator[Line]) -> Iterator[list[Line]]:
    while batch := list(islice(lines, BATCH_EVENTS)):
        yield batch


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
