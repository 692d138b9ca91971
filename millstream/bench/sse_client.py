"""The load client over HTTP: `/v1/completions` with SSE, one request at a time per connection."""

from http import HTTPStatus
from typing import Any, Self

import orjson

from millstream.bench.http_connection import KeepAliveConnection, encode_request, open_connection
from millstream.bench.load_client import (
    CLOSED,
    Clock,
    GatewayAddress,
    KeyRefused,
    LoadRequest,
)
from millstream.bench.load_statistics import Sample
from streams.subjects import Priority

DONE = b"[DONE]"


class SseReader:
    """Parses the SSE answer to one request and records its chunks in `sample`.

    One instance is for one request: the caller passes each piece of the body to `feed` and then
    asks `final_code` how the request went. The events do not say how many tokens they carry, so
    each counts as one token until the total in `usage`, which comes at the end, is spread evenly
    over them. `error_code` is the code of an error that came as an event, else empty; `is_complete`
    is True once the last event (`[DONE]`) has come.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample, self._buffer = sample, b""
        self.error_code = ""
        self.is_complete = False

    def feed(self, body: bytes, now: float) -> None:
        """Parse the next piece of the response's body and record the events it completes.

        `now` is the piece's time of arrival, in the clock's seconds. An incomplete line is kept for
        the next piece. Raises `ValueError` for an event that is not JSON.
        """
        *lines, self._buffer = (self._buffer + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._handle_event(line[5:].strip(), now)

    def _handle_event(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.is_complete = True
            return
        event = orjson.loads(data)
        if error := event.get("error"):
            self.error_code = error["code"]
        if event.get("choices"):
            self._sample.add_chunk(now, 1)
        if usage := event.get("usage"):
            self._sample.prompt_tokens = usage["prompt_tokens"]
            self._sample.spread_tokens(usage["completion_tokens"])

    def final_code(self, status: int) -> str:
        """Return the error code of an answer that has ended; empty if it was complete.

        `status` is the response's HTTP status. For a status other than 200 the code is that of the
        body's error, or `http_` and the status if it has none. For 200 it is `error_code`, or
        `connection_closed` for a stream without its last event. Raises nothing.
        """
        if status != 200:
            return _parse_error_code(self._buffer, status)
        return self.error_code or ("" if self.is_complete else CLOSED)


def _parse_error_code(body: bytes, status: int) -> str:
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"http_{status}"


class SseClient:
    """The `BenchClient` over HTTP with SSE, which sends one request at a time on each connection.

    Entering the context opens one connection. An idle connection is used again, and a new one is
    opened when all are busy, without a limit.
    """

    def __init__(self, address: GatewayAddress, clock: Clock) -> None:
        self._address, self._clock = address, clock
        self._idle: list[KeepAliveConnection] = []

    async def __aenter__(self) -> Self:
        self._idle.append(await open_connection(self._address, self._clock))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for connection in self._idle:
            connection.close()

    async def run_request(self, request: LoadRequest, sample: Sample) -> None:
        """Send one request and record the answer in `sample`; see `BenchClient.run_request`."""
        connection = await self._acquire_connection()
        events = SseReader(sample)
        sample.sent = self._clock()
        try:
            status = await connection.exchange(
                _encode_completion(self._address, request), events.feed
            )
        except ConnectionError:
            sample.finish(self._clock(), CLOSED)
            return
        if connection.is_open:
            self._idle.append(connection)
        if status == HTTPStatus.UNAUTHORIZED:
            raise KeyRefused(self._address)
        sample.finish(self._clock(), events.final_code(status))

    async def _acquire_connection(self) -> KeepAliveConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await open_connection(self._address, self._clock)


def _encode_completion(address: GatewayAddress, request: LoadRequest) -> bytes:
    body: dict[str, Any] = {
        "model": request.model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.priority != Priority.STANDARD:  # the field is unknown to other servers
        body["priority"] = request.priority
    return encode_request("POST", address, "/v1/completions", orjson.dumps(body))
