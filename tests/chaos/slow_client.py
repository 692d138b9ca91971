"""A client that can stop reading, or read slowly, as a strike tells it."""

import asyncio
import socket
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.recording_client import PING_SECONDS, RecordingClient

RECEIVE_BUFFER_BYTES = 32 * 1024  # what its kernel takes for it
SLOW_READ_SECONDS = 0.02  # between two frames


class SlowClient(RecordingClient):
    """Reads like others until it is told not to; its requests are long answers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hears = asyncio.Event()
        self._pause = 0.0
        self.read_normally()

    def read_normally(self) -> None:
        """As fast as it can."""
        self._pause = 0.0
        self._hears.set()

    def read_slowly(self) -> None:
        """Slower than the answers come."""
        self._pause = SLOW_READ_SECONDS

    def stop_reading(self) -> None:
        """Nothing at all."""
        self._hears.clear()

    async def _before_next_read(self) -> None:
        await self._hears.wait()
        if self._pause:
            await asyncio.sleep(self._pause)

    def _connect_options(self, url: str) -> dict[str, Any]:
        """A small buffer, and pings whose answers it need not read: they find out who is gone."""
        tcp = socket.socket()
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        gateway = urlsplit(url)
        tcp.connect((gateway.hostname, gateway.port))
        return {"sock": tcp, "ping_interval": PING_SECONDS, "ping_timeout": None}
