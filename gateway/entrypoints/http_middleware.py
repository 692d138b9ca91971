"""Middleware for all HTTP requests and responses: request ids, CORS, trailing slashes."""

import secrets

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = (
    "request_id"  # in the state of a scope: the accepted request's id, or else a random one
)
_STARTS = ("http.response.start", "websocket.http.response.start")
_EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "retry-after",
    "server-timing",
    "x-should-retry",
    *(
        f"x-ratelimit-{fact}-{unit}"
        for fact in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
_PREFLIGHT_SECONDS = 600


def wrap(application: ASGIApp, cors_origins: tuple[str, ...]) -> ASGIApp:
    """Return the application with request ids, one spelling of paths, and CORS for some origins."""
    if cors_origins:
        application = CORSMiddleware(
            application,
            allow_origins=cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
            max_age=_PREFLIGHT_SECONDS,
        )
    return RequestIds(application)


class RequestIds:
    """Adds `x-request-id` to every response: the accepted request's id, or else a random one.

    Anthropic's clients look for the same id in `request-id`.
    A slash at the end of a path is taken off, so that no client needs a redirect.
    """

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state[REQUEST_ID] = secrets.token_hex(16)
        if scope["type"] == "http" and scope["path"] != "/":
            scope["path"] = scope["path"].rstrip("/") or "/"

        async def send_with_id(message: Message) -> None:
            if message["type"] in _STARTS:
                request_id = state[REQUEST_ID].encode()
                ids = [(b"x-request-id", request_id), (b"request-id", request_id)]
                headers = [*message.get("headers", ()), *ids]
                message = {**message, "headers": headers}
            await send(message)

        await self._application(scope, receive, send_with_id)
