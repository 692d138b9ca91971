"""Operations over HTTP under `/admin/v1`, with health checks and the OpenAPI document."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from admin import openapi
from admin.admin_api import AdminApi
from admin.admin_keys import AdminKeys
from admin.caller import Caller
from admin.metrics import UNAUTHENTICATED
from admin.operation_table import OPERATIONS, PREFIX, Operation
from api.error_bodies import error_body, retry_headers
from api.schemas.parsing import decode
from streams.errors import (
    AddressNotAllowed,
    BadRequest,
    InternalError,
    MethodNotAllowed,
    MillstreamError,
    NotFound,
    PayloadTooLarge,
    TooManyWrongKeys,
    TooSlow,
    Unauthenticated,
    http_status,
)

log = structlog.get_logger()

MAX_BODY_BYTES = 1_000_000  # NATS stores no larger record as shipped
_BODY_SECONDS = 10.0
Checks = Mapping[str, Callable[[], bool]]


def build_app(api: AdminApi, keys: AdminKeys, checks: Checks) -> Starlette:
    """Return the ASGI application; `checks` are what `/readyz` calls."""

    async def readyz(request: Request) -> Response:
        facts = {name: check() for name, check in checks.items()}
        is_ready = all(facts.values())
        return _json_response({"ready": is_ready, **facts}, 200 if is_ready else 503)

    return Starlette(
        routes=[
            Route("/healthz", _healthz),
            Route("/readyz", readyz),
            Route(f"{PREFIX}/openapi.json", _openapi),
            *(_make_route(path, api, keys) for path in {o.path: None for o in OPERATIONS.values()}),
        ],
        exception_handlers={
            HTTPException: _handle_http_exception,
            MillstreamError: _handle_error,
            Exception: _handle_fault,
        },
    )


def _make_route(path: str, api: AdminApi, keys: AdminKeys) -> Route:
    """Return the route of all operations at a path, so that a 405 names all its methods."""
    by_method = {each.method: each for each in OPERATIONS.values() if each.path == path}

    async def handle(request: Request) -> Response:
        await _authenticate(keys, request)
        operation = by_method["GET" if request.method == "HEAD" else request.method]
        arguments = await _read_arguments(operation, request)
        caller = await _authenticate(keys, request)  # the key may have ended meanwhile
        return _json_response(await api.run(operation.name, arguments, caller))

    return Route(PREFIX + path, handle, methods=[*by_method])


async def _authenticate(keys: AdminKeys, request: Request) -> Caller:
    address = request.client.host if request.client else ""
    scheme, _, key = request.headers.get("authorization", "").strip().partition(" ")
    try:
        return await keys.authenticate(key.strip() if scheme.lower() == "bearer" else None, address)
    except (Unauthenticated, TooManyWrongKeys, AddressNotAllowed) as error:
        UNAUTHENTICATED.labels(error.code).inc()
        log.warning("admin_unauthenticated", address=address, code=error.code)
        raise


async def _read_arguments(operation: Operation, request: Request) -> dict[str, Any]:
    """Return the arguments in the path, with those in the body, or else in the query.

    Raises `BadRequest` if one is given twice.
    """
    body = operation.has_body
    given = decode(await _read_body(request)) if body else dict(request.query_params)
    for name in given.keys() & request.path_params:
        raise BadRequest(f"{name} is in the path already", name)
    return given | request.path_params


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise PayloadTooLarge(len(body), MAX_BODY_BYTES)
    except TimeoutError:
        raise TooSlow("the body", _BODY_SECONDS) from None
    return bytes(body)


async def _healthz(request: Request) -> Response:
    return _json_response({"status": "ok"})


async def _openapi(request: Request) -> Response:
    return _json_response(openapi.build_document())


def _json_response(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _error_response(error: MillstreamError) -> Response:
    response = _json_response(error_body(error), http_status(error.code))
    response.headers.update(retry_headers(error))
    return response


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = _error_response(MethodNotAllowed(f"{request.method} is not allowed here"))
        response.headers.update(error.headers or {})
        return response
    return _error_response(NotFound(f"there is nothing at {request.url.path}"))


async def _handle_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MillstreamError)
    return _error_response(error)


async def _handle_fault(request: Request, error: Exception) -> Response:
    if not isinstance(error, ClientDisconnect):
        log.error("admin_request_failed", path=request.url.path, exc_info=error)
    return _error_response(InternalError("the admin service failed; its log says why"))
