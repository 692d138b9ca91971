"""From an HTTP request to a checked body and back to an answer, the same for every endpoint."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import orjson
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import problems
from gateway.door import Door
from gateway.guests import Guest, frames_in
from gateway.intake import Ticket
from gateway.reader import Gone
from gateway.schemas.fields import Body
from gateway.schemas.reading import decode, parse
from gateway.submission import Submission
from registry.tenants import Tenant
from streams.errors import MillstreamError, PayloadTooLarge, TooSlow

log = structlog.get_logger()

BODY_SECONDS = 30.0
_READ_TO_END = 16  # times the limit

B = TypeVar("B", bound=Body)
Submissions = Callable[[B], list[Submission]]
Serve = Callable[[Door, Request, Tenant, B, list[Submission], Send], Awaitable[Response | None]]


class Endpoint(Generic[B]):
    """An ASGI application for one path: authenticates, reads the body, serves, explains errors."""

    def __init__(
        self, door: Door, schema: type[B], submissions: Submissions[B], serve: Serve[B]
    ) -> None:
        self._door, self._schema, self._submissions, self._serve = door, schema, submissions, serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            tenant = self._door.authenticate(authorization(request))
            with self._door.guests.admitted(tenant) as guest:
                await self._answer(request, tenant, guest, send)
        except Gone:
            log.info("client_left", path=scope["path"])
        except MillstreamError as error:
            await problems.response(error)(scope, receive, send)

    async def _answer(self, request: Request, tenant: Tenant, guest: Guest, send: Send) -> None:
        send = self._door.intake.quotas.announcing(tenant, send)
        try:
            body = await _body(request, self._door.settings.max_body_bytes)
            await _in_time(guest, len(body))
            response = await self._respond(request, tenant, body, send)
        except MillstreamError as error:
            response = problems.response(error)
        if response is not None:
            await response(request.scope, request.receive, send)

    async def _respond(
        self, request: Request, tenant: Tenant, data: bytes, send: Send
    ) -> Response | None:
        door = self._door
        body, submissions = await door.porter.carry(len(data), self._read, data)
        return await self._serve(door, request, tenant, body, submissions, send)

    def _read(self, data: bytes) -> tuple[B, list[Submission]]:
        body = parse(self._schema, decode(data))
        return body, self._submissions(body)


def authorization(request: Request) -> str | None:
    """The key that the request came with."""
    return problems.bearer(request.headers.get("authorization", ""))


async def _in_time(guest: Guest, size: int) -> None:
    """Wait as a frame of so many bytes would; a request by itself is no frame."""
    if frames := frames_in(size) - 1:
        await asyncio.sleep(guest.take(time.monotonic(), frames))


async def _body(request: Request, limit: int) -> bytes:
    """`read_body` of a client that may leave (`Gone`), or stop in the middle (`TooSlow`)."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await read_body(request, limit)
    except TimeoutError:
        raise TooSlow("the body", BODY_SECONDS) from None
    except ClientDisconnect:
        raise Gone from None


async def read_body(request: Request, limit: int) -> bytes:
    """The body; raises `PayloadTooLarge` if it is over the limit, at once if it says so itself.

    A connection that is to close after the answer would be closed while its client is writing, so
    there a body that is somewhat too large is read to its end, and thrown away.
    """
    announced = request.headers.get("content-length", "")
    closes = request.headers.get("connection", "").lower() == "close"
    if announced.isdigit() and int(announced) > limit and not closes:
        raise PayloadTooLarge(int(announced), limit)
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            body += part
        elif size > _READ_TO_END * limit:
            break
    if size > limit:
        raise PayloadTooLarge(size, limit)
    return bytes(body)


def json_response(answer: Any, ticket: Ticket, timing: Mapping[str, float]) -> Response:
    """A whole answer, with where its time went."""
    headers = answer_headers(ticket, timing)
    return Response(orjson.dumps(answer), headers=headers, media_type="application/json")


def answer_headers(ticket: Ticket, timing: Mapping[str, float]) -> dict[str, str]:
    stages = stage_header(server_timing(ticket, timing))
    return {"X-Request-Id": ticket.request_id, "Server-Timing": stages}


def server_timing(ticket: Ticket, timing: Mapping[str, float]) -> dict[str, float]:
    """All stages in ms, the gateway's own first."""
    return {"admit": ticket.admit_ms, **timing}


def stage_header(stages: Mapping[str, float]) -> str:
    """The value of a Server-Timing header (W3C)."""
    return ", ".join(f"{stage};dur={milliseconds:.3f}" for stage, milliseconds in stages.items())
