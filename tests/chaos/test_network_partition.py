"""A wire that is cut loses what is sent over it, and says so to nobody."""

import socket
from collections.abc import Iterator

import pytest

from tests.chaos import network_partition

WIRES = [network_partition.wire_address(1, 0), network_partition.wire_address(2, 0)]


@pytest.fixture
def ends() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Both ends of a connection over each wire, in a network of their own."""
    if reason := network_partition.missing_requirement():
        pytest.skip(reason)
    with network_partition.own_namespace(), socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        pairs = [(_connect(address, port), server.accept()[0]) for address in WIRES]
        try:
            yield pairs
        finally:
            for end in (end for pair in pairs for end in pair):
                end.close()


def _connect(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), timeout=10)


@pytest.mark.parametrize("from_far", [False, True])
def test_what_is_cut_is_silent_until_it_is_mended(
    ends: list[tuple[socket.socket, socket.socket]], from_far: bool
) -> None:
    """In both directions; TCP brings what was sent meanwhile, and other wires are whole."""
    (one, other), (near, far) = ends
    sender, receiver = (other, one) if from_far else (one, other)
    network_partition.cut(WIRES[:1])
    sender.sendall(b"lost?")
    near.sendall(b"whole")
    assert far.recv(5) == b"whole"
    receiver.settimeout(0.1)
    with pytest.raises(TimeoutError):
        receiver.recv(5)
    network_partition.mend(WIRES[:1])
    receiver.settimeout(30)
    assert receiver.recv(5) == b"lost?"


def test_a_network_is_left_as_it_was_entered() -> None:
    """What listens in it is not there outside."""
    if reason := network_partition.missing_requirement():
        pytest.skip(reason)
    with network_partition.own_namespace(), socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        _connect("127.0.0.1", port).close()
    with pytest.raises(ConnectionRefusedError):
        _connect("127.0.0.1", port)
