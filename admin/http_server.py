"""The admin API's socket, and its server with bounds."""

import socket

import uvicorn
from starlette.types import ASGIApp

from api.embedded_server import EmbeddedServer
from streams.errors import MillstreamError

_MAX_CONNECTIONS = 256
_MAX_HEAD_BYTES = 64 * 1024
_IDLE_SECONDS = 30


class AdminAddressUnusable(MillstreamError):
    """The admin API cannot listen on its address, mostly because another process does."""


class AdminServer(EmbeddedServer, uvicorn.Server):
    """The server of the admin API."""

    def __init__(self, application: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                http="h11",  # which bounds heads in bytes
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
                limit_concurrency=_MAX_CONNECTIONS,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=2,
            )
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, on any free port for 0; it does not listen yet.

    Raises `AdminAddressUnusable` if the address cannot be bound, for any reason.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by each connection: asyncio would set it on connections of a listener of its own.
    # Without it an answer's body, which follows its head, waits 40 ms for the client's delayed ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise AdminAddressUnusable(
            f"the admin API cannot listen on {host}:{port}: {reason}; choose another port: "
            "--admin-port"
        ) from error
    return listener
