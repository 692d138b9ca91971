"""Recording clients: many requests on one socket, which goes on at the next gateway when it breaks.

They speak the WebSocket's words (docs/websocket.md) themselves, and note every frame: what a
client library would put right must not go unseen.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.frames import CloseCode
from websockets.typing import Subprotocol

from tests.chaos.history import (
    Accepted,
    AccessProbed,
    Cancelled,
    Chunk,
    Disconnected,
    Ended,
    Event,
    Refused,
    Started,
    Submitted,
    UnexpectedFrame,
    UnknownOnResume,
)
from tests.chaos.plan import PlannedRequest

PING_SECONDS = 1.0  # a frozen gateway is left after two
PAUSE_SECONDS = 0.05  # between two gateways that do not answer
PATIENCE_SECONDS = 60.0  # a request that is refused for so long is given up
MOST_PAUSE_MS = 250  # comes again sooner than told, so that the return of service is seen
NOT_FOUND = "request_not_found"
PROBE = "probe-"
Record = Callable[[Event], None]


class LoadClient(Protocol):
    """Sends planned requests and records what comes of each; `run` it until cancelled."""

    name: str

    @property
    def idle(self) -> bool: ...

    async def run(self) -> None: ...

    async def submit(self, ask: PlannedRequest) -> None: ...


class OpenRequest:
    """One request of a client, from the first try to its terminal."""

    def __init__(self, ask: PlannedRequest, begun: float) -> None:
        self.planned, self.started_at = ask, begun
        self.request_id = ""
        self.received = 0
        self.cancelled = False
        self.is_resuming = False
        self.socket: ClientConnection | None = None  # on which it is open

    def opening_frame(self) -> dict[str, Any]:
        """How it begins on a new socket: as what was accepted, or once more with its key."""
        self.is_resuming = bool(self.request_id)
        if self.request_id:
            after = self.received - 1
            return {
                "type": "resume",
                "id": self.planned.name,
                "request_id": self.request_id,
                "after": after,
            }
        large = {"logprobs": self.planned.logprobs} if self.planned.logprobs else {}
        return large | {
            "type": "generate",
            "id": self.planned.name,
            "model": "mock",
            "prompt": self.planned.prompt,
            "max_tokens": self.planned.max_tokens,
            "seed": self.planned.seed,
            "idempotency_key": f"{self.planned.name}-{self.planned.seed}",
        }


class RecordingClient:
    """One tenant's socket; `run` keeps it open until cancelled."""

    def __init__(
        self,
        name: str,
        tenant: str,
        key: str,
        gateways: Sequence[str],
        clock: Callable[[], float],
        record: Record,
    ) -> None:
        self.name, self.tenant, self._key = name, tenant, key
        self._gateways = itertools.cycle(gateways)
        self._clock, self._record = clock, record
        self._streams: dict[str, OpenRequest] = {}
        self._socket: ClientConnection | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def idle(self) -> bool:
        return not self._streams

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            for url in self._gateways:
                try:
                    await self._run_socket(url)
                except ConnectionClosed as error:
                    code = error.rcvd.code if error.rcvd else CloseCode.ABNORMAL_CLOSURE
                    self._record(Disconnected(self._clock(), self.name, code))
                except (OSError, WebSocketException, TimeoutError):
                    pass  # nobody there, or it drains: the next one
                await asyncio.sleep(PAUSE_SECONDS)

    async def _run_socket(self, url: str) -> None:
        async with connect(
            url,
            subprotocols=[Subprotocol("millstream.v1.json")],
            additional_headers={"Authorization": f"Bearer {self._key}"},
            open_timeout=2 * PING_SECONDS,
            close_timeout=PING_SECONDS,
            compression=None,
            **self._connect_options(url),
        ) as socket:
            self._socket = socket
            try:
                for stream in list(self._streams.values()):
                    await self._open(stream)
                async for frame in socket:
                    self._receive(json.loads(frame))
                    await self._before_next_read()
            finally:
                self._socket = None

    def _connect_options(self, url: str) -> dict[str, Any]:
        """How it connects and listens: a gateway that is silent is left."""
        return {"ping_interval": PING_SECONDS, "ping_timeout": 2 * PING_SECONDS}

    async def _before_next_read(self) -> None:
        """At once."""

    async def submit(self, ask: PlannedRequest) -> None:
        """Ask for something; it goes on by itself, over any number of sockets."""
        self._record(Submitted(self._clock(), ask.name, self.tenant, ask.words, self.name))
        stream = self._streams[ask.name] = OpenRequest(ask, self._clock())
        await self._open(stream)
        if ask.cancel_after is not None:
            self._schedule(ask.cancel_after, self._cancel(stream))

    async def probe(self, request_id: str) -> None:
        """Try to read another tenant's request."""
        frame = {"type": "resume", "id": PROBE + request_id, "request_id": request_id, "after": -1}
        while self._socket is None:
            await asyncio.sleep(PAUSE_SECONDS)
        await self._send(frame)

    async def _open(self, stream: OpenRequest) -> None:
        """Ask for it on the socket of the moment, unless it is open there already."""
        if self._socket and stream.socket is not self._socket:
            stream.socket = self._socket
            await self._send(stream.opening_frame())
            if stream.cancelled:
                await self._send({"type": "cancel", "id": stream.planned.name})

    async def _cancel(self, stream: OpenRequest) -> None:
        if stream.planned.name in self._streams:
            stream.cancelled = True
            self._record(Cancelled(self._clock(), stream.planned.name))
            await self._send({"type": "cancel", "id": stream.planned.name})

    async def _send(self, frame: dict[str, Any]) -> None:
        """On the socket of the moment; the next one begins with everything that is open."""
        try:
            if self._socket:
                await self._socket.send(json.dumps(frame))
        except WebSocketException:
            pass  # `_speak` sees it too

    def _schedule(self, seconds: float, act: Any) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            await act

        assert self._tasks, "it runs"
        self._tasks.create_task(wait())

    def _receive(self, frame: dict[str, Any]) -> None:
        name = str(frame.get("id", ""))
        if name.startswith(PROBE):
            answer = frame.get("code", frame["type"])
            self._record(AccessProbed(self.tenant, name.removeprefix(PROBE), answer))
        elif stream := self._streams.get(name):
            self._record_frame(stream, frame)
        elif frame["type"] != "draining":
            what = frame.get("code", frame["type"])
            self._record(UnexpectedFrame(self._clock(), self.name, name, what))

    def _record_frame(self, stream: OpenRequest, frame: dict[str, Any]) -> None:
        now, name = self._clock(), stream.planned.name
        match frame["type"]:
            case "accepted":
                stream.request_id, stream.is_resuming = frame["request_id"], False
                self._record(Accepted(now, name, stream.request_id))
            case "started":
                self._record(Started(now, name, frame["attempt"]))
            case "chunk":
                stream.received = frame["index"] + frame["count"]
                self._record(Chunk(now, name, frame["index"], frame["count"], frame["text"]))
            case "done":
                used = frame["usage"]["completion_tokens"]
                reason, timing = frame["finish_reason"], frame["timing"]
                self._end(stream, Ended(now, name, reason, used, timing))
            case "error":
                self._fail(stream, frame, now)

    def _handle_not_found(self, stream: OpenRequest, now: float) -> None:
        """Nobody knows it: its log went with the brokers' memory, and its key stands for it then.

        Of what is open here a cancel has crossed with the end.
        """
        if stream.is_resuming and stream.received:
            self._end(stream, Ended(now, stream.planned.name, NOT_FOUND, None))
        elif stream.is_resuming:
            self._record(UnknownOnResume(now, stream.planned.name))
            stream.request_id, stream.socket = "", None
            self._schedule(PING_SECONDS, self._open(stream))

    def _end(self, stream: OpenRequest, event: Event) -> None:
        self._record(event)
        del self._streams[stream.planned.name]

    def _fail(self, stream: OpenRequest, frame: dict[str, Any], now: float) -> None:
        """An end, or a refusal of what may be tried again."""
        name, code, pause = stream.planned.name, frame["code"], frame.get("retry_after_ms")
        if code == NOT_FOUND:
            self._handle_not_found(stream, now)
            return
        if stream.request_id and pause is None:
            self._end(stream, Ended(now, name, code, None))
            return
        stream.socket = None
        if not stream.request_id:
            self._record(Refused(now, name, code, pause))
        if pause is None or (not stream.request_id and now - stream.started_at > PATIENCE_SECONDS):
            del self._streams[name]
        else:
            self._schedule(min(pause, MOST_PAUSE_MS) / 1000, self._open(stream))
