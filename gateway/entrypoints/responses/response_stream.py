"""Writes the events of one response as server-sent events, and pings a client of a silent one."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from starlette.types import Send

from api import completion_events
from api.openai_bodies import JsonBody
from api.responses.response_events import encode_event
from gateway.entrypoints.completions import PING_INTERVAL_SECONDS
from streams.errors import MillstreamError


class EventWriter:
    """Sends events with ASGI's `send`, those alone whose number is above `after`."""

    def __init__(self, send: Send, after: int = -1) -> None:
        self._send, self._after = send, after
        self._is_silent = True

    @property
    def after(self) -> int:
        """The number of the last event that the client has."""
        return self._after

    async def begin(self) -> None:
        """Send the headers."""
        headers = [
            (b"content-type", completion_events.MEDIA_TYPE.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, events: Iterable[JsonBody]) -> None:
        """Send those events that the client does not have, in one write."""
        new = [event for event in events if event["sequence_number"] > self._after]
        if new:
            self._after = new[-1]["sequence_number"]
            await self._write(b"".join(map(encode_event, new)))

    async def fail(self, error: MillstreamError) -> None:
        """Send an `error` event: the stream ends here, and the response perhaps not."""
        told = {"code": error.code, "message": error.message, "param": None}
        event = {"type": "error", "sequence_number": self._after + 1, **told}
        await self._write(encode_event(event))

    async def end(self) -> None:
        """End the body."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, data: bytes) -> None:
        self._is_silent = False
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def ping(self) -> None:
        """Send a comment whenever nothing was sent for a while, until cancelled."""
        while True:
            self._is_silent = True
            await asyncio.sleep(PING_INTERVAL_SECONDS)
            if self._is_silent:
                await self._write(completion_events.PING)


@asynccontextmanager
async def pinging(writer: EventWriter) -> AsyncIterator[None]:
    """Ping the client while the block runs."""
    task = asyncio.create_task(writer.ping(), name="ping")
    try:
        yield
    finally:
        task.cancel()
