"""The HTTP client: `/v1/completions` as SSE, one request at a time per connection."""

from typing import Any, Self

import orjson

from millstream.bench.clients import CLOSED, Address, Ask, Clock
from millstream.bench.http import Connection, connect, head
from millstream.bench.statistics import Sample
from streams.subjects import Priority

DONE = b"[DONE]"


class Events:
    """Reads one answer: events into `sample`, or the error that came instead.

    Events do not tell how many tokens they carry: `usage`, at the end, is spread over them.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample, self._rest = sample, b""
        self.code = ""
        self.complete = False

    def feed(self, body: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.complete = True
            return
        event = orjson.loads(data)
        if error := event.get("error"):
            self.code = error["code"]
        if event.get("choices"):
            self._sample.add(now, 1)
        if usage := event.get("usage"):
            self._sample.prompt_tokens = usage["prompt_tokens"]
            self._sample.settle(usage["completion_tokens"])

    def verdict(self, status: int) -> str:
        """The error code of an answer that has ended; empty if all is well."""
        if status != 200:
            return _code(self._rest, status)
        return self.code or ("" if self.complete else CLOSED)


def _code(body: bytes, status: int) -> str:
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"http_{status}"


class SseClient:
    """Keeps connections that were used and are idle; opens another where none is."""

    def __init__(self, address: Address, clock: Clock) -> None:
        self._address, self._clock = address, clock
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Self:
        self._idle.append(await connect(self._address, self._clock))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for connection in self._idle:
            connection.close()

    async def ask(self, ask: Ask, sample: Sample) -> None:
        connection = await self._connection()
        events = Events(sample)
        sample.sent = self._clock()
        try:
            status = await connection.exchange(_request(self._address, ask), events.feed)
        except ConnectionError:
            sample.end(self._clock(), CLOSED)
            return
        sample.end(self._clock(), events.verdict(status))
        if connection.is_open:
            self._idle.append(connection)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await connect(self._address, self._clock)


def _request(address: Address, ask: Ask) -> bytes:
    body: dict[str, Any] = {
        "model": ask.model,
        "prompt": ask.prompt,
        "max_tokens": ask.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ask.priority != Priority.STANDARD:  # which other servers know nothing of
        body["priority"] = ask.priority
    return head("POST", address, "/v1/completions", orjson.dumps(body))
