"""The listening socket and uvicorn's configuration, with limits that the operating system keeps."""

import asyncio
import resource
import socket

import structlog
import uvicorn
from starlette.types import ASGIApp

from api.embedded_server import EmbeddedServer
from gateway.server.http_protocol import TCP_TIMEOUT_SECONDS, HttpProtocol, ServerConfig
from gateway.server.idle_connections import IdleConnections
from gateway.server.tls_certificate import ServerCertificate
from gateway.server.tls_listener import MAX_HANDSHAKES, TlsListener
from gateway.server.websocket_protocol import WebSocketProtocol
from gateway.settings import GatewaySettings
from streams.errors import MillstreamError

log = structlog.get_logger()

MAX_IDLE_CONNECTIONS = 2048  # connections without a request
MAX_PAUSED_CLIENTS = 1024  # of HTTP, which do not read: some 256 KiB each
RESERVED_DESCRIPTORS = 256  # for all that is not a client
RECEIVE_BUFFER_BYTES = 128 * 1024  # the kernel's buffer for what we have not read
UNSENT_BYTES = 32 * 1024  # the kernel's buffer for what it has not sent; the rest is ours to count


class AddressInUse(MillstreamError):
    """The gateway cannot listen on its address, mostly because another process does."""


class DescriptorUnusable(MillstreamError):
    """The descriptor `--fd` is not one of a bound TCP socket that this process has inherited."""

    def __init__(self, descriptor: int, reason: str) -> None:
        super().__init__(
            f"--fd {descriptor} cannot be listened on: {reason}; name a bound TCP socket "
            "that this process inherits, or leave --fd out"
        )
        self.descriptor = descriptor


class GatewayServer(EmbeddedServer, uvicorn.Server):
    """The gateway's server; with a certificate it serves TLS alone."""

    config: ServerConfig

    def __init__(self, config: ServerConfig, certificate: ServerCertificate | None = None) -> None:
        super().__init__(config)
        self._certificate = certificate
        self._tls_tasks: list[asyncio.Task[None]] = []

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve clients of these bound sockets until `should_exit`; then close them."""
        if self._certificate is None:
            await super().serve(sockets)
            return
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._certificate.run(), name="certificate")
            self._tls_tasks = [watching]
            for listener in sockets or ():
                listener.listen(self.config.backlog)
                listener.setblocking(False)
                accepting = TlsListener(self._certificate, self._make_protocol).run(listener)
                self._tls_tasks.append(tasks.create_task(accepting, name="tls-listener"))
            await super().serve([])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and close those that are open."""
        for task in self._tls_tasks:
            task.cancel()
        await super().shutdown(sockets)

    def _make_protocol(self) -> HttpProtocol:
        return HttpProtocol(self.config, self.server_state, {})


def listen(settings: GatewaySettings) -> socket.socket:
    """Return a socket bound to the address in the settings; it does not listen yet.

    It is the inherited one if the settings have its descriptor. Its options (buffer sizes,
    keep-alive) are inherited by each connection. Raises `AddressInUse` if the address cannot be
    bound, for any reason, and `DescriptorUnusable` if the descriptor is of no such socket.
    """
    listener = _bind(settings) if settings.fd is None else _inherit(settings.fd)
    _set_socket_options(listener)
    return listener


def _bind(settings: GatewaySettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        address = f"{settings.host}:{settings.port}"
        raise AddressInUse(f"cannot listen on {address}: {error.strerror}") from error
    return listener


def _inherit(descriptor: int) -> socket.socket:
    try:
        inherited = socket.socket(fileno=descriptor)
    except OSError as error:
        raise DescriptorUnusable(descriptor, error.strerror or str(error)) from error
    is_tcp = inherited.family in (socket.AF_INET, socket.AF_INET6)
    if not is_tcp or inherited.type is not socket.SOCK_STREAM or not inherited.getsockname()[1]:
        inherited.detach()  # it is not ours to close
        raise DescriptorUnusable(descriptor, "it is no bound TCP socket")
    inherited.set_inheritable(False)
    return inherited


def _set_socket_options(listener: socket.socket) -> None:
    """Bound the kernel's memory for each client, and close if its machine or network is gone."""
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
    """Return uvicorn's configuration with this gateway's protocols and limits.

    As a side effect, the process's limit of open files is raised to the most that is allowed. The
    limit of connections is that of the settings, or fewer if there are not enough file descriptors.
    """
    config = ServerConfig(
        application,
        http=HttpProtocol,
        ws=WebSocketProtocol,
        # a frame over our own limit gets an error as its answer; one over this closes the socket
        ws_max_size=4 * settings.max_body_bytes,
        ws_per_message_deflate=False,  # tokens are too short to compress and too many to try
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=settings.idle_seconds,
        backlog=4096,
    )
    reserved = RESERVED_DESCRIPTORS + (MAX_HANDSHAKES if settings.tls_cert else 0)
    config.max_connections = _limit_connections(settings.max_connections, reserved)
    config.idle_connections = IdleConnections(MAX_IDLE_CONNECTIONS)
    config.paused_clients = IdleConnections(MAX_PAUSED_CLIENTS)
    return config


def _limit_connections(requested: int, reserved: int) -> int:
    """The requested number of connections, or as many as the process may have descriptors for.

    `reserved` descriptors are not for connections.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return requested
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if requested > limit - reserved:
        log.warning("connections_limited_by_descriptors", requested=requested, descriptors=limit)
    return max(1, min(requested, limit - reserved))
