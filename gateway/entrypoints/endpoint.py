"""HTTP endpoints: from a request to its checked body and back to a response, for every path."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import orjson
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.authentication.authenticator import Principal
from api.content_encoding import decode_content
from api.schemas.fields import Body
from api.schemas.parsing import decode, parse
from api.submission.quota_checks import quota_scopes
from api.submission.quotas import Quotas
from api.submission.submission_record import Submission
from gateway import error_responses
from gateway.admission.client_requests import Ticket
from gateway.api_key_headers import find_key
from gateway.context import GatewayContext
from gateway.replies.record_queue import ClientGone
from gateway.server.connection_limits import FrameRateLimiter, frame_cost
from registry.tenant_records import Tenant
from streams.errors import MillstreamError, PayloadTooLarge, TooSlow

log = structlog.get_logger()

BODY_TIMEOUT_SECONDS = 30.0
_MAX_DISCARDED_FACTOR = 16  # of a body, times its limit: more is not read to its end

B = TypeVar("B", bound=Body)
ToSubmissions = Callable[[B], list[Submission]]
RenderError = Callable[[Request, MillstreamError], Response]
Serve = Callable[
    [GatewayContext, Request, Principal, B, list[Submission], Send], Awaitable[Response | None]
]


class Endpoint(Generic[B]):
    """The ASGI application of one POST path: authenticates, reads and parses the body, and answers.

    A `MillstreamError` becomes an error response, in OpenAI's shape unless `render_error` has
    another. If the client leaves, nothing is sent.
    """

    def __init__(
        self,
        context: GatewayContext,
        schema: type[B],
        to_submissions: ToSubmissions[B],
        serve: Serve[B],
        render_error: RenderError = lambda request, error: error_responses.error_response(error),
    ) -> None:
        self._context, self._schema = context, schema
        self._to_submissions, self._serve = to_submissions, serve
        self._render_error = render_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            principal = await self._context.authenticate(request_key(request), scope, "infer")
            with self._context.connection_limits.admit(principal.tenant) as rate_limiter:
                await self._answer(request, principal, rate_limiter, send)
        except ClientGone:
            log.info("client_left", path=scope["path"])
        except MillstreamError as error:
            await self._render_error(request, error)(scope, receive, send)

    async def _answer(
        self, request: Request, principal: Principal, rate_limiter: FrameRateLimiter, send: Send
    ) -> None:
        send = _add_rate_limit_headers(self._context.submitter.quotas, principal.tenant, send)
        try:
            body = await self._read_decoded_body(request)
            await _wait_for_rate(rate_limiter, len(body))
            response = await self._respond(request, principal, body, send)
        except MillstreamError as error:
            response = self._render_error(request, error)
        if response is not None:
            await response(request.scope, request.receive, send)

    async def _read_decoded_body(self, request: Request) -> bytes:
        """Return the body, decompressed if it has a `Content-Encoding`."""
        limit = self._context.settings.max_body_bytes
        body = await read_body_in_time(request, limit)
        encoding = request.headers.get("content-encoding", "")
        if not encoding:
            return body
        return await self._context.offload_thread.run(limit, decode_content, body, encoding, limit)

    async def _respond(
        self, request: Request, principal: Principal, data: bytes, send: Send
    ) -> Response | None:
        context = self._context
        body, submissions = await context.offload_thread.run(len(data), self._parse_body, data)
        return await self._serve(context, request, principal, body, submissions, send)

    def _parse_body(self, data: bytes) -> tuple[B, list[Submission]]:
        body = parse(self._schema, decode(data))
        return body, self._to_submissions(body)


def request_key(request: Request) -> str | None:
    """Return the API key of a request; None if it has none."""
    return find_key(request.scope["headers"])


def _add_rate_limit_headers(quotas: Quotas, tenant: Tenant, send: Send) -> Send:
    """Return a `send` that adds the `x-ratelimit-*` headers of a tenant with quotas.

    For tenants without quotas it is `send` itself.
    """
    if not quota_scopes(tenant):
        return send

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], *quotas.rate_limit_headers(tenant)]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_headers


async def _wait_for_rate(rate_limiter: FrameRateLimiter, size: int) -> None:
    """Wait as long as a frame of `size` bytes would have to; the request itself costs nothing."""
    if frames := frame_cost(size) - 1:
        await asyncio.sleep(rate_limiter.reserve(time.monotonic(), frames))


async def read_body_in_time(request: Request, limit: int) -> bytes:
    """Read the body; raises `TooSlow` after `BODY_TIMEOUT_SECONDS`, `ClientGone` if it leaves."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            return await read_body(request, limit)
    except TimeoutError:
        raise TooSlow("the body", BODY_TIMEOUT_SECONDS) from None
    except ClientDisconnect:
        raise ClientGone from None


async def read_body(request: Request, limit: int) -> bytes:
    """Return the whole body of a request; raise `PayloadTooLarge` if it is over `limit` bytes.

    A Content-Length over the limit raises before anything is read. There is one exception: if the
    connection is to close after the response, it would be closed while the client still writes, and
    the response would be lost. Then the body is first read and dropped, up to its end or to 16
    times the limit. Raises `ClientDisconnect` (Starlette's) if the client leaves.
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
        elif size > _MAX_DISCARDED_FACTOR * limit:
            break
    if size > limit:
        raise PayloadTooLarge(size, limit)
    return bytes(body)


def json_response(content: Any, ticket: Ticket, timing: Mapping[str, float]) -> Response:
    """Return a whole response with its stages' times in Server-Timing."""
    headers = response_headers(ticket, timing)
    return Response(orjson.dumps(content), headers=headers, media_type="application/json")


def response_headers(ticket: Ticket, timing: Mapping[str, float]) -> dict[str, str]:
    """Return the headers X-Request-Id and Server-Timing of a response that is not streamed.

    `timing` is in milliseconds by stage.
    """
    stages = format_server_timing(collect_stages(ticket, timing))
    return {"Server-Timing": stages}


def collect_stages(ticket: Ticket, timing: Mapping[str, float]) -> dict[str, float]:
    """Return the milliseconds of each stage of a request: `admit`, then those in `timing`.

    `admit` is the gateway's own, from the submission to the broker's confirmation.
    """
    return {"admit": ticket.admit_ms, **timing}


def format_server_timing(stages: Mapping[str, float]) -> str:
    """Return the value of a Server-Timing header (W3C) for stages, given in milliseconds."""
    return ", ".join(f"{stage};dur={milliseconds:.3f}" for stage, milliseconds in stages.items())
