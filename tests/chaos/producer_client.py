"""Producers of the load: programs of tenants that publish to NATS, each tenant as its own user.

They do what docs/producers.md tells: publish until the broker has stored it, and once more, read
each reply once, and ask for those that were missed.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from streams import messages
from streams.broker.reconnecting_client import ReconnectingClient
from streams.connection_files import ConnectionFiles
from streams.errors import BrokerUnavailable
from streams.headers import MESSAGE_ID, ROUTE
from tests.chaos.history import Accepted, Chunk, Ended, Refused, Started, Stored, Submitted
from tests.chaos.plan import PlannedRequest
from tests.chaos.recording_client import PATIENCE_SECONDS, Record

ACK_SECONDS = 5.0
PAUSE_SECONDS = 0.25  # between two tries of what the broker did not take
SILENCE_SECONDS = 2.0  # after which a producer asks what it may have missed
TIMES = 2  # that each submission is stored: it is one request all the same
_UNREACHED = (nats.errors.Error, nats.js.errors.Error, BrokerUnavailable, OSError, TimeoutError)


class ProducedRequest:
    """One submission of a producer, and what it has heard of it."""

    def __init__(self, ask: PlannedRequest) -> None:
        self.planned, self.route = ask, f"{ask.name}-{ask.seed}"
        self.replies: asyncio.Queue[Msg] = asyncio.Queue()
        self.request_id = ""
        self.last = self.received = self.characters = 0  # sequence, tokens, characters of text
        self.has_ended = False


class ProducerClient:
    """A tenant's program; `run` keeps its connection until cancelled."""

    def __init__(
        self,
        name: str,
        tenant: str,
        brokers: str,
        credentials: Path,
        clock: Callable[[], float],
        record: Record,
    ) -> None:
        self.name, self.tenant = name, tenant
        self._connection = ReconnectingClient(brokers, name, ConnectionFiles(creds=credentials))
        self._clock, self._record = clock, record
        self._tasks: asyncio.TaskGroup | None = None
        self._open = Counter[str]()
        self._is_connected = asyncio.Event()

    @property
    def idle(self) -> bool:
        return not self._open

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            await _until_reached(self._connection.open)
            self._is_connected.set()
            try:
                await self._connection.run()
            finally:
                await self._connection.close()

    async def submit(self, ask: PlannedRequest) -> None:
        """Ask for something; it goes on by itself, over any number of connections."""
        stream = ProducedRequest(ask)
        self._record(
            Submitted(
                self._clock(), ask.name, self.tenant, ask.words, self.name, route=stream.route
            )
        )
        self._open[ask.name] += 1
        await self._is_connected.wait()
        assert self._tasks, "it runs"
        self._tasks.create_task(self._produce(stream), name=ask.name)

    async def _produce(self, stream: ProducedRequest) -> None:
        subject = f"infer.reply.{self.tenant}.{stream.route}.>"
        subscription = await _until_reached(
            lambda: self._connection.subscribe(subject, stream.replies.put)
        )
        for _ in range(TIMES):
            await _until_reached(lambda: self._store(stream))
            self._record(Stored(self._clock(), stream.planned.name))
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for record in self._read(stream):
                    self._note(stream, record)
                    if stream.has_ended:
                        break
        await subscription.unsubscribe()
        del self._open[stream.planned.name]

    async def _store(self, stream: ProducedRequest) -> None:
        ask = stream.planned
        body = {"prompt": ask.prompt, "max_tokens": ask.max_tokens, "seed": ask.seed}
        headers = {MESSAGE_ID: stream.route, ROUTE: stream.route}
        await self._connection.client.jetstream(timeout=ACK_SECONDS).publish(
            f"infer.submit.{self.tenant}.mock.standard", json.dumps(body).encode(), headers=headers
        )

    async def _read(self, stream: ProducedRequest) -> AsyncIterator[dict[str, Any]]:
        """Every record of a submission in order, some twice; what was missed is read where stored.

        A log that was lost and put back has other sequences: then all of it is read again.
        """
        while True:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    message = await stream.replies.get()
            except TimeoutError:
                for record in await self._stored(stream):
                    yield record
                continue
            stream.request_id = message.subject.rpartition(".")[2]
            headers = message.headers or {}
            seq, before = int(headers["Nats-Sequence"]), int(headers["Nats-Last-Sequence"])
            if before == stream.last:
                stream.last = seq
                yield messages.unpack(message.data)
            elif seq != stream.last:
                for record in await self._stored(stream):
                    yield record

    async def _stored(self, stream: ProducedRequest) -> list[dict[str, Any]]:
        """The stored records; those that came before an answer failed, which is asked again."""
        if not stream.request_id:
            return []  # it has missed all of them: nobody tells it which request it has become
        question = f"infer.records.{self.tenant}.{stream.route}.{stream.request_id}"
        found, after_seq = list[dict[str, Any]](), 0
        while True:
            after = json.dumps({"after": after_seq}).encode()
            try:
                answer = await self._connection.client.request(question, after, timeout=ACK_SECONDS)
            except _UNREACHED:
                return found
            page = messages.unpack(answer.data)
            for seq, record in page.get("records", ()):
                stream.last = after_seq = seq
                found.append(messages.unpack(record))
            if not page.get("remaining"):
                return found

    def _note(self, stream: ProducedRequest, record: dict[str, Any]) -> None:
        now, name = self._clock(), stream.planned.name
        match record["type"]:
            case "accepted":
                self._record(Accepted(now, name, record["request_id"]))
            case "started":
                self._record(Started(now, name, record["attempt"]))
            case "chunk":
                self._note_chunk(stream, record, now)
            case "done":
                used = record["usage"]["completion_tokens"]
                self._end(stream, Ended(now, name, record["finish_reason"], used))
            case "error" if stream.request_id.startswith("refused-"):
                self._record(Refused(now, name, record["code"], None))
                stream.has_ended = True
            case "error":
                self._end(stream, Ended(now, name, record["code"], None))

    def _note_chunk(self, stream: ProducedRequest, record: dict[str, Any], now: float) -> None:
        """Note what is new of a chunk: an output that was lost is generated again."""
        end = record["index"] + record["count"]
        if end <= stream.received:
            return
        begin = max(record["index"], stream.received)
        text = record["text"][max(0, stream.characters - record["characters"]) :]
        self._record(Chunk(now, stream.planned.name, begin, end - begin, text))
        stream.received = end
        stream.characters = max(stream.characters, record["characters"] + len(record["text"]))

    def _end(self, stream: ProducedRequest, event: Ended) -> None:
        self._record(event)
        stream.has_ended = True


async def _until_reached(act: Callable[[], Any]) -> Any:
    """The result of what is tried until the broker takes it, or the run is over."""
    while True:
        try:
            return await act()
        except _UNREACHED:
            await asyncio.sleep(PAUSE_SECONDS)
