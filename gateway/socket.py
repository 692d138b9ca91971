"""`GET /v1/stream`: many requests over one WebSocket.

Raw ASGI, since a frame passes here per token.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgpack
import orjson
import structlog
from starlette.types import Receive, Scope, Send

from gateway import problems
from gateway.call import Call
from gateway.door import Door
from gateway.following import Following
from gateway.guests import Guest, frames_in
from gateway.metrics import SOCKETS, Watch, count_refused
from gateway.outbound import Frame, Outbound
from gateway.result_frame import ResultFrame
from gateway.schemas.frames import CancelFrame, ResumeFrame, WorkFrame
from gateway.schemas.reading import Encoding, decode, frame_id, parse_frame
from gateway.submission import Submission
from gateway.weight import Weight
from registry.tenants import Tenant
from streams.errors import (
    BadRequest,
    MillstreamError,
    PayloadTooLarge,
    Refused,
    RequestNotFound,
)

log = structlog.get_logger()

PROTOCOLS: dict[str, Encoding] = {"millstream.v1.json": "json", "millstream.v1.msgpack": "msgpack"}
BEARER = "bearer."
MOST_CALLS = 1024  # open requests of one socket
_GOING_AWAY = 1001


def _json(frame: dict[str, Any]) -> str:
    return orjson.dumps(frame).decode()


ENCODE: dict[Encoding, Callable[[dict[str, Any]], Frame]] = {
    "json": _json,
    "msgpack": msgpack.packb,
}


async def stream(door: Door, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one connection; its requests live on for the grace period when it drops."""
    await receive()  # websocket.connect
    offered: list[str] = scope["subprotocols"]
    try:
        door.check_open()
        tenant = door.authenticate(_key(scope, offered))
        protocol = _protocol(offered)
        with door.guests.admitted(tenant) as guest:
            await send({"type": "websocket.accept", "subprotocol": protocol})
            encoding = PROTOCOLS[protocol or "millstream.v1.json"]
            with SOCKETS.track_inprogress():
                await Connection(door, tenant, guest, encoding, send).serve(receive)
    except MillstreamError as error:
        await problems.deny(send, error)


def _key(scope: Scope, offered: list[str]) -> str | None:
    """The credential: the Authorization header, or for browsers a subprotocol `bearer.<key>`."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for name, value in headers:
        if name == b"authorization":
            return problems.bearer(value.decode("latin-1"))
    return next((p.removeprefix(BEARER) for p in offered if p.startswith(BEARER)), None)


def _protocol(offered: list[str]) -> str | None:
    """The first subprotocol that we speak; a client that offers none gets JSON."""
    named = [name for name in offered if not name.startswith(BEARER)]
    spoken = next((name for name in named if name in PROTOCOLS), None)
    if named and spoken is None:
        raise BadRequest(f"the subprotocol must be one of: {', '.join(PROTOCOLS)}")
    return spoken


class Connection:
    """One client's socket: its calls by the client's own ids."""

    def __init__(
        self, door: Door, tenant: Tenant, guest: Guest, encoding: Encoding, send: Send
    ) -> None:
        self._door, self._tenant, self._guest, self._send = door, tenant, guest, send
        self._encoding: Encoding = encoding
        self._encode = ENCODE[encoding]
        self._calls: dict[str, Call] = {}
        self._outbound = Outbound(self._go_on)
        self._submitting = Weight(door.settings.max_body_bytes)

    async def serve(self, receive: Receive) -> None:
        """Read and write until the client leaves or is cut, or the gateway drains."""
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write_all(), name="write")
                ending = tasks.create_task(self._end_when_draining(), name="end")
                await self._read(receive, tasks)
                writing.cancel()
                ending.cancel()
        except* OSError:
            pass  # the client is gone; uvicorn says so in this way while we write
        finally:
            self._leave()

    async def _read(self, receive: Receive, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._outbound.room()  # who does not read answers may not ask for more
            await self._submitting.room()
            event = await receive()
            if event["type"] == "websocket.disconnect":
                return
            text = event.get("text")
            data = text.encode() if text is not None else event["bytes"]
            if too_early := self._guest.take(time.monotonic(), frames_in(len(data))):
                await asyncio.sleep(too_early)
            await self._take(data, text is not None, tasks)

    async def _take(self, data: bytes, is_text: bool, tasks: asyncio.TaskGroup) -> None:
        """One frame of the client. What is wrong with it is told to it and harms nothing else.

        Returns once it was read, so that a `cancel` does not overtake what it is for.
        """
        wire: dict[str, Any] = {}
        size, carry = len(data), self._door.porter.carry
        try:
            self._check(size, is_text)
            wire = await carry(size, decode, data, self._encoding)
            frame = await carry(size, parse_frame, wire)
            match frame:
                case CancelFrame():
                    self._cancel(frame)
                case ResumeFrame():
                    call = self._open(frame.id, frame.after)
                    tasks.create_task(self._resume(call, frame), name=f"resume-{frame.id}")
                case _:
                    call = self._open(frame.id)
                    submitting = self._submit(call, frame, size)
                    task = tasks.create_task(submitting, name=f"submit-{frame.id}")
                    self._submitting.add(size)
                    task.add_done_callback(lambda _: self._submitting.remove(size))
        except MillstreamError as error:
            self._fail(frame_id(wire), error)

    def _check(self, size: int, is_text: bool) -> None:
        """Raises for a frame of the wrong kind or over the limit."""
        if is_text != (self._encoding == "json"):
            wanted, came = ("binary", "text") if is_text else ("text", "binary")
            raise BadRequest(f"frames of this subprotocol are {wanted}, this one is {came}")
        limit = self._door.settings.max_body_bytes
        if size > limit:
            raise PayloadTooLarge(size, limit)

    def _open(self, id: str, after: int = -1) -> Call:
        if id in self._calls:
            raise BadRequest(f"the id {id!r} is in use on this socket", "id")
        if len(self._calls) >= MOST_CALLS:
            raise Refused(f"this socket has {MOST_CALLS} open requests already")
        call = self._calls[id] = Call(id, self._put, ResultFrame(self._encoding), after)
        return call

    async def _submit(self, call: Call, frame: WorkFrame, size: int) -> None:
        arrived, tenant = time.perf_counter(), self._tenant
        sink = partial(self._sink, call)
        with self._explaining(call):
            self._door.check_open()
            submission = await self._door.porter.carry(size, Submission.of, frame)
            ticket = await self._door.intake.submit(tenant, submission, sink, frame.idempotency_key)
            watch = Watch(tenant.name, ticket.model.name, submission.priority, arrived)
            self._accept(call, ticket.following, watch, ticket.admit_ms)

    async def _resume(self, call: Call, frame: ResumeFrame) -> None:
        tenant, sink = self._tenant.name, partial(self._sink, call)
        with self._explaining(call):
            self._door.check_open()
            following = await self._door.relay.resume(tenant, frame.request_id, sink, frame.after)
            self._accept(call, following, Watch.resumed(tenant), 0.0)

    @contextmanager
    def _explaining(self, call: Call) -> Iterator[None]:
        """Tells the client why its call did not come in; our own faults end that call alone."""
        try:
            yield
        except MillstreamError as error:
            count_refused(self._tenant.name, error.code)
            self._close(call)
            self._fail(call.id, error)
        except Exception:
            log.exception("call_failed", tenant=self._tenant.name)
            self._close(call)
            self._fail(call.id, MillstreamError("the gateway failed; its log says why"))

    def _accept(self, call: Call, following: Following, watch: Watch, admit_ms: float) -> None:
        call.accept(following, watch, admit_ms)
        self._door.relay.go_on(following)
        if call.ended:
            self._close(call)
        elif call.cancel_wanted:
            self._door.relay.cancel(following)

    def _cancel(self, frame: CancelFrame) -> None:
        call = self._calls.get(frame.id)
        if call is None:
            raise RequestNotFound(frame.id)
        call.cancel_wanted = True
        if call.following:
            self._door.relay.cancel(call.following)

    def _sink(self, call: Call, record: dict[str, Any], size: int) -> bool:
        room = call.record(record, size)
        if call.ended:
            self._close(call)
        return room

    def _close(self, call: Call) -> None:
        if self._calls.get(call.id) is call:
            del self._calls[call.id]

    def _put(self, frame: dict[str, Any] | Frame) -> bool:
        return self._outbound.put(self._encode(frame) if isinstance(frame, dict) else frame)

    async def _write_all(self) -> None:
        """Write what is put; after the last frame send the client elsewhere."""
        await self._outbound.run(self._write)
        await self._send({"type": "websocket.close", "code": _GOING_AWAY, "reason": "draining"})

    async def _write(self, frame: Frame) -> None:
        kind = "text" if isinstance(frame, str) else "bytes"
        await self._send({"type": "websocket.send", kind: frame})

    def _fail(self, id: str | None, error: MillstreamError) -> None:
        self._put({"type": "error", **({"id": id} if id else {}), **problems.facts(error)})

    def _go_on(self) -> None:
        for call in self._calls.values():
            if call.following:
                self._door.relay.go_on(call.following)

    async def _end_when_draining(self) -> None:
        """Once the gateway drains: say so, and end when nothing is under way here."""
        await self._door.draining.wait()
        self._put({"type": "draining"})
        while self._calls:
            await asyncio.sleep(0.05)
        self._outbound.end()

    def _leave(self) -> None:
        for call in self._calls.values():
            if call.following:
                self._door.relay.orphan(call.following)
        self._calls.clear()
