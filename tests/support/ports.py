"""Ports for tests: outside the kernel's ephemeral range, and apart for each pytest-xdist process.

A port of the ephemeral range may become the local port of any connection between the moment it is
found free and the moment its user binds it, or while the user is down for a restart.
"""

import itertools
import os
import socket

_FIRST_PORT, _PORTS_PER_PROCESS = 12_000, 1_000
_process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_offsets = itertools.cycle(range(_PORTS_PER_PROCESS))


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nobody listens; it is not given out again soon."""
    for offset in itertools.islice(_offsets, _PORTS_PER_PROCESS):
        port = _FIRST_PORT + _process * _PORTS_PER_PROCESS + offset
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError("no free port")
