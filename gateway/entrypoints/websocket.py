"""`GET /v1/stream`: serves many requests over one WebSocket.

It is raw ASGI, without Starlette's WebSocket class, because each token is a frame.
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
from api.authentication.authenticator import Principal
from api.schemas.parsing import Encoding, decode, find_frame_id, parse_frame
from api.schemas.websocket_frames import CancelFrame, ResumeFrame, WorkFrame
from api.submission.submission_record import Submission
from gateway import error_responses
from gateway.api_key_headers import find_key
from gateway.context import GatewayContext
from gateway.entrypoints.byte_budget import ByteBudget
from gateway.entrypoints.websocket_reply import ResultFrame, WebSocketReply
from gateway.metrics import OPEN_WEBSOCKETS, RequestMetrics
from gateway.replies.log_cursor import LogCursor
from gateway.replies.log_subscription import LogSubscription
from gateway.replies.send_buffer import EncodedFrame, SendBuffer
from gateway.server.connection_limits import FrameRateLimiter, frame_cost
from streams.errors import (
    BadRequest,
    MillstreamError,
    PayloadTooLarge,
    Refused,
    RequestNotFound,
)
from streams.records.fleet.waking import Waking

log = structlog.get_logger()

SUBPROTOCOLS: dict[str, Encoding] = {
    "millstream.v1.json": "json",
    "millstream.v1.msgpack": "msgpack",
}
BEARER_PREFIX = "bearer."
MAX_OPEN_REQUESTS = 1024  # of one socket
_DRAINED = (1001, "draining")  # close code and reason
_POLICY_VIOLATION = 1008  # the close code with the code of the error for which a client was cut


def _encode_json(frame: dict[str, Any]) -> str:
    return orjson.dumps(frame).decode()


ENCODERS: dict[Encoding, Callable[[dict[str, Any]], EncodedFrame]] = {
    "json": _encode_json,
    "msgpack": msgpack.packb,
}


async def serve_websocket(
    context: GatewayContext, scope: Scope, receive: Receive, send: Send
) -> None:
    """Serve one WebSocket connection, from its handshake until it is closed.

    A refused handshake is answered with an HTTP error, and nothing is raised. Requests that are
    open when the connection is lost run on for the grace period, in which the client can resume
    them on another connection.
    """
    await receive()  # websocket.connect
    offered: list[str] = scope["subprotocols"]
    try:
        context.check_not_draining()
        credential = _find_credential(scope, offered)
        principal = await context.authenticate(credential, scope, "infer")
        protocol = _choose_subprotocol(offered)
        with context.connection_limits.admit(principal.tenant) as rate_limiter:
            await send({"type": "websocket.accept", "subprotocol": protocol})
            encoding = SUBPROTOCOLS[protocol or "millstream.v1.json"]
            with OPEN_WEBSOCKETS.track_inprogress():
                connection = WebSocketConnection(context, principal, rate_limiter, encoding, send)
                with context.watching(principal, "infer", connection.cut):
                    await connection.serve(receive)
    except MillstreamError as error:
        await error_responses.deny_websocket(send, error)


def _find_credential(scope: Scope, offered: list[str]) -> str | None:
    """The credential: a header's, or for browsers a subprotocol `bearer.<key>`."""
    return find_key(scope["headers"]) or next(
        (p.removeprefix(BEARER_PREFIX) for p in offered if p.startswith(BEARER_PREFIX)), None
    )


def _choose_subprotocol(offered: list[str]) -> str | None:
    """The first subprotocol that we speak; None, which means JSON, if the client offers none.

    Raises `BadRequest` if it offers only others.
    """
    named = [name for name in offered if not name.startswith(BEARER_PREFIX)]
    spoken = next((name for name in named if name in SUBPROTOCOLS), None)
    if named and spoken is None:
        raise BadRequest(f"the subprotocol must be one of: {', '.join(SUBPROTOCOLS)}")
    return spoken


class WebSocketConnection:
    """One client's open WebSocket, with its requests in progress by the client's own ids."""

    def __init__(
        self,
        context: GatewayContext,
        principal: Principal,
        rate_limiter: FrameRateLimiter,
        encoding: Encoding,
        send: Send,
    ) -> None:
        self._context, self._principal = context, principal
        self._rate_limiter, self._send = rate_limiter, send
        self._encoding: Encoding = encoding
        self._encode = ENCODERS[encoding]
        self._requests: dict[str, WebSocketReply] = {}
        self._send_buffer = SendBuffer(self._unpause_requests)
        self._bytes_in_flight = ByteBudget(context.settings.max_body_bytes)
        self._closing, self._is_cut = _DRAINED, False

    async def serve(self, receive: Receive) -> None:
        """Read and write until the client leaves, or is closed by a drain or a revoked key."""
        try:
            with self._context.fleet.listening("", self._on_waking):
                async with asyncio.TaskGroup() as tasks:
                    writing = tasks.create_task(self._write_all(), name="write")
                    ending = tasks.create_task(self._end_when_draining(), name="end")
                    await self._read_frames(receive, tasks)
                    writing.cancel()
                    ending.cancel()
        except* OSError:
            pass  # the client is gone: uvicorn raises this while we write
        finally:
            self._orphan_requests()

    async def _read_frames(self, receive: Receive, tasks: asyncio.TaskGroup) -> None:
        while True:
            # A client that does not read its answers may not ask for more
            await self._send_buffer.wait_for_room()
            await self._bytes_in_flight.wait_for_room()
            event = await receive()
            if event["type"] == "websocket.disconnect":
                return
            text = event.get("text")
            data = text.encode() if text is not None else event["bytes"]
            if wait_seconds := self._rate_limiter.reserve(time.monotonic(), frame_cost(len(data))):
                await asyncio.sleep(wait_seconds)
            if not self._is_cut:
                await self._handle_frame(data, text is not None, tasks)

    async def _handle_frame(self, data: bytes, is_text: bool, tasks: asyncio.TaskGroup) -> None:
        """Handle one frame; an error in it is sent to the client and harms nothing else.

        Returns once the frame was parsed and its request is open, so that a `cancel` cannot
        overtake the request that it is for.
        """
        wire: dict[str, Any] = {}
        size, offload = len(data), self._context.offload_thread.run
        try:
            self._check_frame(size, is_text)
            self._rate_limiter.update_limits(self._principal.check("infer"))
            wire = await offload(size, decode, data, self._encoding)
            frame = await offload(size, parse_frame, wire)
            match frame:
                case CancelFrame():
                    self._cancel(frame)
                case ResumeFrame():
                    request = self._open_request(frame.id, frame.after)
                    tasks.create_task(self._resume(request, frame), name=f"resume-{frame.id}")
                case _:
                    request = self._open_request(frame.id)
                    submitting = self._submit(request, frame, size)
                    task = tasks.create_task(submitting, name=f"submit-{frame.id}")
                    self._bytes_in_flight.add(size)
                    task.add_done_callback(lambda _: self._bytes_in_flight.remove(size))
        except MillstreamError as error:
            self._enqueue_error(find_frame_id(wire), error)

    def _check_frame(self, size: int, is_text: bool) -> None:
        """Raise `BadRequest` for a frame of the wrong kind, `PayloadTooLarge` over the limit."""
        if is_text != (self._encoding == "json"):
            wanted, came = ("binary", "text") if is_text else ("text", "binary")
            raise BadRequest(f"frames of this subprotocol are {wanted}, this one is {came}")
        limit = self._context.settings.max_body_bytes
        if size > limit:
            raise PayloadTooLarge(size, limit)

    def _open_request(self, id: str, after: int = -1) -> WebSocketReply:
        if id in self._requests:
            raise BadRequest(f"the id {id!r} is in use on this socket", "id")
        if len(self._requests) >= MAX_OPEN_REQUESTS:
            raise Refused(f"this socket has {MAX_OPEN_REQUESTS} open requests already")
        request = self._requests[id] = WebSocketReply(
            id, self._enqueue_frame, ResultFrame(self._encoding), after
        )
        return request

    async def _submit(self, request: WebSocketReply, frame: WorkFrame, size: int) -> None:
        arrived, tenant = time.perf_counter(), self._principal.tenant
        sink = partial(self._deliver_record, request)
        with self._reporting_errors(request, frame.model, frame.lane_priority):
            self._context.check_not_draining()
            submission = await self._context.offload_thread.run(size, Submission.from_body, frame)
            (validated,) = await self._context.preparation.validate(tenant, submission)
            self._principal.check("infer")  # it may have ended while the prompt was tokenised
            ticket = await self._context.client_requests.submit(
                validated, sink, frame.idempotency_key
            )
            metrics = RequestMetrics(tenant.name, ticket.model.name, submission.priority, arrived)
            request.waiting_for_model = ticket.model.name
            self._accept_request(request, ticket.subscription, metrics, ticket.admit_ms)

    async def _resume(self, request: WebSocketReply, frame: ResumeFrame) -> None:
        tenant, sink = self._principal.tenant.name, partial(self._deliver_record, request)
        with self._reporting_errors(request):
            self._context.check_not_draining()
            subscription = await self._context.relay.resume(
                tenant, frame.request_id, sink, LogCursor(frame.after, frame.characters)
            )
            self._accept_request(request, subscription, RequestMetrics.for_resumed(tenant), 0.0)

    @contextmanager
    def _reporting_errors(
        self, request: WebSocketReply, model: str = "", priority: str = ""
    ) -> Iterator[None]:
        """Send errors of the block to the client, and close the request; our own faults, too."""
        try:
            yield
        except MillstreamError as error:
            self._context.refusals.count(self._principal.tenant.name, error.code, model, priority)
            self._close_request(request)
            self._enqueue_error(request.id, error)
        except Exception:
            log.exception("websocket_request_failed", tenant=self._principal.tenant.name)
            self._close_request(request)
            self._enqueue_error(request.id, MillstreamError("the gateway failed; its log says why"))

    def _accept_request(
        self,
        request: WebSocketReply,
        subscription: LogSubscription,
        metrics: RequestMetrics,
        admit_ms: float,
    ) -> None:
        request.accept(subscription, metrics, admit_ms)
        model = request.waiting_for_model
        is_asleep = model is not None and self._context.is_asleep(model)
        if is_asleep and (waking := self._context.fleet.waking(model or "")):
            request.send_waking(waking, self._context.broker.clock.now())
        self._context.relay.unpause(subscription)
        if request.is_ended:
            self._close_request(request)
        elif request.is_cancel_requested:
            self._context.relay.cancel(subscription)

    def _cancel(self, frame: CancelFrame) -> None:
        request = self._requests.get(frame.id)
        if request is None:
            raise RequestNotFound(frame.id)
        request.is_cancel_requested = True
        if request.subscription:
            self._context.relay.cancel(request.subscription)

    def _deliver_record(self, request: WebSocketReply, record: dict[str, Any], size: int) -> bool:
        has_room = request.receive_record(record, size)
        if request.is_ended:
            self._close_request(request)
        return has_room

    def _close_request(self, request: WebSocketReply) -> None:
        if self._requests.get(request.id) is request:
            del self._requests[request.id]

    def _enqueue_frame(self, frame: dict[str, Any] | EncodedFrame) -> bool:
        return self._send_buffer.put(self._encode(frame) if isinstance(frame, dict) else frame)

    async def _write_all(self) -> None:
        """Write frames until no more are to come; then close the socket and say why."""
        await self._send_buffer.run(self._write)
        code, reason = self._closing
        await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _write(self, frame: EncodedFrame) -> None:
        kind = "text" if isinstance(frame, str) else "bytes"
        await self._send({"type": "websocket.send", kind: frame})

    def _enqueue_error(self, id: str | None, error: MillstreamError) -> None:
        self._enqueue_frame(
            {"type": "error", **({"id": id} if id else {}), **error_bodies.error_fields(error)}
        )

    def _on_waking(self, waking: Waking) -> None:
        """Tell of a model's wake those requests that wait for its first worker."""
        now = self._context.broker.clock.now()
        for request in self._requests.values():
            if request.waiting_for_model == waking.model:
                request.send_waking(waking, now)

    def _unpause_requests(self) -> None:
        for request in self._requests.values():
            if request.subscription:
                self._context.relay.unpause(request.subscription)

    async def _end_when_draining(self) -> None:
        """Once the gateway drains tell the client, and end when no request is open here."""
        await self._context.draining.wait()
        self._enqueue_frame({"type": "draining"})
        while self._requests:
            await asyncio.sleep(0.05)
        self._send_buffer.finish()

    def cut(self, reason: MillstreamError) -> None:
        """Cancel the open requests, and close the socket behind the frames that wait for it."""
        self._closing, self._is_cut = (_POLICY_VIOLATION, reason.code), True
        for request in self._requests.values():
            request.is_cancel_requested = True
            if request.subscription:
                self._context.relay.cancel(request.subscription)
        self._send_buffer.finish()

    def _orphan_requests(self) -> None:
        for request in self._requests.values():
            if request.subscription:
                self._context.relay.orphan(request.subscription)
        self._requests.clear()
