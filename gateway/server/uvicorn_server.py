"""The listening socket and the server on it, with the bounds that the operating system keeps."""

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvicorn
from starlette.types import ASGIApp

from gateway.server.http_protocol import HttpProtocol
from gateway.server.idle_connections import IdleConnections
from gateway.server.server_config import ServerConfig
from gateway.server.websocket_protocol import WebSocketProtocol
from gateway.settings import GatewaySettings
from streams.errors import MillstreamError

log = structlog.get_logger()

MAX_IDLE_CONNECTIONS = 2048  # connections without a request
RESERVED_DESCRIPTORS = 256  # for all that is not a client
RECEIVE_BUFFER_BYTES = 128 * 1024  # that the kernel takes from a client and we have not read
UNSENT_BYTES = 32 * 1024  # that it takes from us and has not sent; the rest is ours to count
TCP_TIMEOUT_SECONDS = 20  # so long what was sent may go without a sign from the client's machine


class AddressInUse(MillstreamError):
    """Somebody else listens there."""


class GatewayServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(settings: GatewaySettings) -> socket.socket:
    """A bound socket, whose options its connections inherit. Raises `AddressInUse`."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _set_socket_options(listener)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        address = f"{settings.host}:{settings.port}"
        raise AddressInUse(f"cannot listen on {address}: {error.strerror}") from error
    return listener


def _set_socket_options(listener: socket.socket) -> None:
    """Little memory in the kernel, and an end to clients whose machine or network is gone."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    tcp = {
        socket.TCP_NOTSENT_LOWAT: UNSENT_BYTES,
        socket.TCP_USER_TIMEOUT: TCP_TIMEOUT_SECONDS * 1000,
        socket.TCP_KEEPIDLE: TCP_TIMEOUT_SECONDS // 2,
        socket.TCP_KEEPINTVL: TCP_TIMEOUT_SECONDS // 4,
    }
    for option, value in tcp.items():
        listener.setsockopt(socket.IPPROTO_TCP, option, value)


def build_config(application: ASGIApp, settings: GatewaySettings) -> ServerConfig:
    """What the server shall do, and how much of it."""
    found = ServerConfig(
        application,
        http=HttpProtocol,
        ws=WebSocketProtocol,
        # over the limit of a frame we answer with an error; over this the socket is closed (1009)
        ws_max_size=4 * settings.max_body_bytes,
        ws_per_message_deflate=False,  # tokens are too short to compress and too many to try
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=2,
        backlog=4096,
    )
    found.max_connections = _limit_connections(settings.max_connections)
    found.idle_connections = IdleConnections(MAX_IDLE_CONNECTIONS)
    return found


def _limit_connections(wanted: int) -> int:
    """As many as were wanted, if the process may have so many descriptors."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if wanted > most - RESERVED_DESCRIPTORS:
        log.warning("connections_limited_by_descriptors", wanted=wanted, descriptors=most)
    return max(1, min(wanted, most - RESERVED_DESCRIPTORS))
