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

from api import error_bodies
from api.schemas.parsing import Encoding, decode, find_frame_id, parse_frame
from api.schemas.websocket_frames import CancelFrame, ResumeFrame, WorkFrame
from api.submission.submission import Submission
from gateway import error_responses
from gateway.context import GatewayContext
from gateway.entrypoints.byte_budget import ByteBudget
from gateway.entrypoints.result_frame import ResultFrame
from gateway.entrypoints.ws_request import WebSocketRequest
from gateway.metrics import OPEN_WEBSOCKETS, RequestMetrics, count_refused
from gateway.replies.log_subscription import LogSubscription
from gateway.replies.send_buffer import EncodedFrame, SendBuffer
from gateway.server.connection_limits import FrameRateLimiter, frame_cost
from registry.tenant_records import Tenant
from streams.errors import (
    BadRequest,
    MillstreamError,
    PayloadTooLarge,
    Refused,
    RequestNotFound,
)

log = structlog.get_logger()

SUBPROTOCOLS: dict[str, Encoding] = {
    "millstream.v1.json": "json",
    "millstream.v1.msgpack": "msgpack",
}
BEARER_PREFIX = "bearer."
MAX_OPEN_REQUESTS = 1024  # open requests of one socket
_GOING_AWAY = 1001


def _encode_json(frame: dict[str, Any]) -> str:
    return orjson.dumps(frame).decode()


ENCODERS: dict[Encoding, Callable[[dict[str, Any]], EncodedFrame]] = {
    "json": _encode_json,
    "msgpack": msgpack.packb,
}


async def serve_websocket(door: GatewayContext, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one connection; its requests live on for the grace period when it drops."""
    await receive()  # websocket.connect
    offered: list[str] = scope["subprotocols"]
    try:
        door.check_not_draining()
        tenant = door.authenticate(_find_credential(scope, offered))
        protocol = _choose_subprotocol(offered)
        with door.connection_limits.admit(tenant) as guest:
            await send({"type": "websocket.accept", "subprotocol": protocol})
            encoding = SUBPROTOCOLS[protocol or "millstream.v1.json"]
            with OPEN_WEBSOCKETS.track_inprogress():
                await WebSocketConnection(door, tenant, guest, encoding, send).serve(receive)
    except MillstreamError as error:
        await error_responses.deny_websocket(send, error)


def _find_credential(scope: Scope, offered: list[str]) -> str | None:
    """The credential: the Authorization header, or for browsers a subprotocol `bearer.<key>`."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for name, value in headers:
        if name == b"authorization":
            return error_responses.parse_bearer(value.decode("latin-1"))
    return next(
        (p.removeprefix(BEARER_PREFIX) for p in offered if p.startswith(BEARER_PREFIX)), None
    )


def _choose_subprotocol(offered: list[str]) -> str | None:
    """The first subprotocol that we speak; a client that offers none gets JSON."""
    named = [name for name in offered if not name.startswith(BEARER_PREFIX)]
    spoken = next((name for name in named if name in SUBPROTOCOLS), None)
    if named and spoken is None:
        raise BadRequest(f"the subprotocol must be one of: {', '.join(SUBPROTOCOLS)}")
    return spoken


class WebSocketConnection:
    """One client's socket: its calls by the client's own ids."""

    def __init__(
        self,
        door: GatewayContext,
        tenant: Tenant,
        guest: FrameRateLimiter,
        encoding: Encoding,
        send: Send,
    ) -> None:
        self._context, self._tenant, self._rate_limiter, self._send = door, tenant, guest, send
        self._encoding: Encoding = encoding
        self._encode = ENCODERS[encoding]
        self._requests: dict[str, WebSocketRequest] = {}
        self._send_buffer = SendBuffer(self._unpause_requests)
        self._bytes_in_flight = ByteBudget(door.settings.max_body_bytes)

    async def serve(self, receive: Receive) -> None:
        """Read and write until the client leaves or is cut, or the gateway drains."""
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write_all(), name="write")
                ending = tasks.create_task(self._end_when_draining(), name="end")
                await self._read_frames(receive, tasks)
                writing.cancel()
                ending.cancel()
        except* OSError:
            pass  # the client is gone; uvicorn says so in this way while we write
        finally:
            self._orphan_requests()

    async def _read_frames(self, receive: Receive, tasks: asyncio.TaskGroup) -> None:
        while True:
            await (
                self._send_buffer.wait_for_room()
            )  # who does not read answers may not ask for more
            await self._bytes_in_flight.wait_for_room()
            event = await receive()
            if event["type"] == "websocket.disconnect":
                return
            text = event.get("text")
            data = text.encode() if text is not None else event["bytes"]
            if too_early := self._rate_limiter.reserve(time.monotonic(), frame_cost(len(data))):
                await asyncio.sleep(too_early)
            await self._handle_frame(data, text is not None, tasks)

    async def _handle_frame(self, data: bytes, is_text: bool, tasks: asyncio.TaskGroup) -> None:
        """One frame of the client. What is wrong with it is told to it and harms nothing else.

        Returns once it was read, so that a `cancel` does not overtake what it is for.
        """
        wire: dict[str, Any] = {}
        size, carry = len(data), self._context.offload_thread.run
        try:
            self._check_frame(size, is_text)
            wire = await carry(size, decode, data, self._encoding)
            frame = await carry(size, parse_frame, wire)
            match frame:
                case CancelFrame():
                    self._cancel(frame)
                case ResumeFrame():
                    call = self._open_request(frame.id, frame.after)
                    tasks.create_task(self._resume(call, frame), name=f"resume-{frame.id}")
                case _:
                    call = self._open_request(frame.id)
                    submitting = self._submit(call, frame, size)
                    task = tasks.create_task(submitting, name=f"submit-{frame.id}")
                    self._bytes_in_flight.add(size)
                    task.add_done_callback(lambda _: self._bytes_in_flight.remove(size))
        except MillstreamError as error:
            self._enqueue_error(find_frame_id(wire), error)

    def _check_frame(self, size: int, is_text: bool) -> None:
        """Raises for a frame of the wrong kind or over the limit."""
        if is_text != (self._encoding == "json"):
            wanted, came = ("binary", "text") if is_text else ("text", "binary")
            raise BadRequest(f"frames of this subprotocol are {wanted}, this one is {came}")
        limit = self._context.settings.max_body_bytes
        if size > limit:
            raise PayloadTooLarge(size, limit)

    def _open_request(self, id: str, after: int = -1) -> WebSocketRequest:
        if id in self._requests:
            raise BadRequest(f"the id {id!r} is in use on this socket", "id")
        if len(self._requests) >= MAX_OPEN_REQUESTS:
            raise Refused(f"this socket has {MAX_OPEN_REQUESTS} open requests already")
        call = self._requests[id] = WebSocketRequest(
            id, self._enqueue_frame, ResultFrame(self._encoding), after
        )
        return call

    async def _submit(self, call: WebSocketRequest, frame: WorkFrame, size: int) -> None:
        arrived, tenant = time.perf_counter(), self._tenant
        sink = partial(self._deliver_record, call)
        with self._reporting_errors(call):
            self._context.check_not_draining()
            submission = await self._context.offload_thread.run(size, Submission.from_body, frame)
            ticket = await self._context.submitter.submit(
                tenant, submission, sink, frame.idempotency_key
            )
            watch = RequestMetrics(tenant.name, ticket.model.name, submission.priority, arrived)
            self._accept_request(call, ticket.subscription, watch, ticket.admit_ms)

    async def _resume(self, call: WebSocketRequest, frame: ResumeFrame) -> None:
        tenant, sink = self._tenant.name, partial(self._deliver_record, call)
        with self._reporting_errors(call):
            self._context.check_not_draining()
            following = await self._context.relay.resume(
                tenant, frame.request_id, sink, frame.after
            )
            self._accept_request(call, following, RequestMetrics.for_resumed(tenant), 0.0)

    @contextmanager
    def _reporting_errors(self, call: WebSocketRequest) -> Iterator[None]:
        """Tells the client why its call did not come in; our own faults end that call alone."""
        try:
            yield
        except MillstreamError as error:
            count_refused(self._tenant.name, error.code)
            self._close_request(call)
            self._enqueue_error(call.id, error)
        except Exception:
            log.exception("websocket_request_failed", tenant=self._tenant.name)
            self._close_request(call)
            self._enqueue_error(call.id, MillstreamError("the gateway failed; its log says why"))

    def _accept_request(
        self,
        call: WebSocketRequest,
        following: LogSubscription,
        watch: RequestMetrics,
        admit_ms: float,
    ) -> None:
        call.accept(following, watch, admit_ms)
        self._context.relay.unpause(following)
        if call.is_ended:
            self._close_request(call)
        elif call.is_cancel_requested:
            self._context.relay.cancel(following)

    def _cancel(self, frame: CancelFrame) -> None:
        call = self._requests.get(frame.id)
        if call is None:
            raise RequestNotFound(frame.id)
        call.is_cancel_requested = True
        if call.subscription:
            self._context.relay.cancel(call.subscription)

    def _deliver_record(self, call: WebSocketRequest, record: dict[str, Any], size: int) -> bool:
        room = call.receive_record(record, size)
        if call.is_ended:
            self._close_request(call)
        return room

    def _close_request(self, call: WebSocketRequest) -> None:
        if self._requests.get(call.id) is call:
            del self._requests[call.id]

    def _enqueue_frame(self, frame: dict[str, Any] | EncodedFrame) -> bool:
        return self._send_buffer.put(self._encode(frame) if isinstance(frame, dict) else frame)

    async def _write_all(self) -> None:
        """Write what is put; after the last frame send the client elsewhere."""
        await self._send_buffer.run(self._write)
        await self._send({"type": "websocket.close", "code": _GOING_AWAY, "reason": "draining"})

    async def _write(self, frame: EncodedFrame) -> None:
        kind = "text" if isinstance(frame, str) else "bytes"
        await self._send({"type": "websocket.send", kind: frame})

    def _enqueue_error(self, id: str | None, error: MillstreamError) -> None:
        self._enqueue_frame(
            {"type": "error", **({"id": id} if id else {}), **error_bodies.error_fields(error)}
        )

    def _unpause_requests(self) -> None:
        for call in self._requests.values():
            if call.subscription:
                self._context.relay.unpause(call.subscription)

    async def _end_when_draining(self) -> None:
        """Once the gateway drains: say so, and end when nothing is under way here."""
        await self._context.draining.wait()
        self._enqueue_frame({"type": "draining"})
        while self._requests:
            await asyncio.sleep(0.05)
        self._send_buffer.finish()

    def _orphan_requests(self) -> None:
        for call in self._requests.values():
            if call.subscription:
                self._context.relay.orphan(call.subscription)
        self._requests.clear()
