"""Addresses on this machine: which are free, and the one socket that all gateways listen on."""

import errno
import socket

from streams.errors import MillstreamError


class PortInUse(MillstreamError):
    """`port` cannot be bound, in most cases because another program listens on it.

    `option` is the command-line flag with which the user can choose another port.
    """

    def __init__(self, option: str, port: int) -> None:
        super().__init__(
            f"port {port} is taken; stop what listens there, or choose another: {option}"
        )
        self.option, self.port = option, port


class AddressUnusable(MillstreamError):
    """An address cannot be bound: it is not on this machine, or the port is privileged."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen on {host} port {port}: {reason.lower()}")
        self.host, self.port = host, port


def claim_port(host: str, port: int, option: str) -> int:
    """Return `port` if it is free, or any free port for 0.

    Raises `PortInUse`, naming `option`, and `AddressUnusable` where no port of `host` would do.
    The port is not kept open: another program may still take it.
    """
    with bind_socket(host, port, option) as probe:
        return int(probe.getsockname()[1])


def bind_socket(host: str, port: int, option: str) -> socket.socket:
    """Return a TCP socket that is bound to an address, and does not listen yet.

    The port 0 is any free one. Raises `PortInUse`, naming `option`, and `AddressUnusable` where no
    port of `host` would do.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(option, port) from error
        raise AddressUnusable(host, port, error.strerror or str(error)) from error
    return bound
