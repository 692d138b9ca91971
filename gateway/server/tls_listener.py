"""Accepts connections with TLS: handshakes that are bounded in number and time, and counted.

A connection is the server's own only after its handshake. uvloop would do the rest, but it hides
how a handshake ended, and holds a client that says nothing for a minute.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from gateway.metrics import HANDSHAKES
from gateway.server.idle_connections import IdleConnections
from gateway.server.response_framing import encode_last_error
from gateway.server.tls_certificate import ServerCertificate
from streams import topology
from streams.errors import BadRequest

log = structlog.get_logger()

HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 512  # under way: the longest gives way to a new one
PLAIN_LINGER_SECONDS = 1.0  # for a client without TLS to read why it is refused
PAUSE_AFTER_ERROR_SECONDS = 0.1  # before accepting again, if there are no descriptors left
_RECORD_OF_HANDSHAKE = b"\x16"  # the first byte of every connection with TLS
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_client_certificate",
    "CERTIFICATE_VERIFY_FAILED": "client_certificate_refused",
    "UNSUPPORTED_PROTOCOL": "old_protocol",
    "NO_SHARED_CIPHER": "old_protocol",
}


@dataclass(eq=False)
class Handshake:
    """A connection whose handshake is under way."""

    task: "asyncio.Task[None]"

    def evict(self) -> None:
        """Close the connection, because there are too many handshakes."""
        self.task.cancel()


class TlsListener:
    """Accepts connections of one socket, and hands those whose handshake succeeds to protocols."""

    def __init__(
        self, certificate: ServerCertificate, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._certificate, self._make_protocol = certificate, make_protocol
        self._handshakes = IdleConnections(MAX_HANDSHAKES)

    async def run(self, listener: socket.socket) -> None:
        """Accept connections until this is cancelled; then end handshakes, close the listener."""
        loop = asyncio.get_running_loop()
        with listener:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    try:
                        connection, _ = await loop.sock_accept(listener)
                    except OSError as error:
                        log.error("accept_failed", reason=str(error))
                        await asyncio.sleep(PAUSE_AFTER_ERROR_SECONDS)
                        continue
                    task = tasks.create_task(self._receive(connection), name="tls-handshake")
                    self._follow(Handshake(task))

    def _follow(self, handshake: Handshake) -> None:
        handshake.task.add_done_callback(lambda _: self._handshakes.discard(handshake))
        self._handshakes.add(handshake)

    async def _receive(self, connection: socket.socket) -> None:
        """Do the handshake of a new connection; closes it if that fails, and raises nothing."""
        outcome, reason = "evicted", ""
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                outcome = await self._shake_hands(connection)
        except TimeoutError:
            outcome = "timeout"
        except ssl.SSLError as error:
            outcome, reason = _classify(error), str(error)
        except OSError as error:
            outcome, reason = "closed", str(error)
        finally:
            HANDSHAKES.labels(outcome).inc()
            if outcome != "accepted":
                connection.close()
                log.debug("tls_handshake_failed", outcome=outcome, reason=reason)

    async def _shake_hands(self, connection: socket.socket) -> str:
        first_byte = await _peek(connection)
        if not first_byte:
            return "closed"
        if first_byte != _RECORD_OF_HANDSHAKE:
            await _refuse_plain(connection)
            return "plain"
        await asyncio.get_running_loop().connect_accepted_socket(
            self._make_protocol,
            connection,
            ssl=self._certificate.context,
            ssl_shutdown_timeout=topology.LOG_SECONDS,  # `TlsTransport` ends connections sooner
        )
        return "accepted"


async def _peek(connection: socket.socket) -> bytes:
    """Wait for the first byte of a connection, and leave it there; empty if the client closes."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK)


async def _refuse_plain(connection: socket.socket) -> None:
    """Tell a client that speaks without TLS what is wrong, over HTTP, and drop what it sends."""
    loop = asyncio.get_running_loop()
    refusal = encode_last_error(BadRequest("this port speaks TLS: use https:// or wss://"))
    with suppress(TimeoutError):
        async with asyncio.timeout(PLAIN_LINGER_SECONDS):
            await loop.sock_sendall(connection, refusal)
            connection.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(connection, 65_536):
                pass


def _classify(error: ssl.SSLError) -> str:
    reason = error.reason or ""
    if "ALERT" in reason:
        return "refused_by_client"  # it does not trust our certificate, mostly
    return _REASONS.get(reason, "malformed")
