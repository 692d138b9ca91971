"""The socket that a gateway listens on: its own, or one that it has inherited."""

import os
import socket

import pytest

from gateway.server.uvicorn_server import RECEIVE_BUFFER_BYTES, DescriptorUnusable, listen
from gateway.settings import GatewaySettings


def settings(fd: int) -> GatewaySettings:
    return GatewaySettings(nats="nats://127.0.0.1:4222", fd=fd)


def test_an_inherited_socket_is_listened_on_as_an_own_one() -> None:
    """With the same limits for each connection; it is not passed on to children."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        copy = os.dup(bound.fileno())
        with listen(settings(copy)) as listener:
            assert listener.getsockname() == bound.getsockname()
            buffer = listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            assert buffer >= RECEIVE_BUFFER_BYTES
            assert not listener.get_inheritable()


def test_a_descriptor_that_is_none_is_told() -> None:
    """A wrong number in a service file."""
    with pytest.raises(DescriptorUnusable, match="--fd 999 cannot be listened on: Bad file desc"):
        listen(settings(999))


def test_another_kind_of_socket_is_refused_and_left_open() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        with pytest.raises(DescriptorUnusable, match="it is no bound TCP socket"):
            listen(settings(other.fileno()))
        other.bind(("127.0.0.1", 0))
