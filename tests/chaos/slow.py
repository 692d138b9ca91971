"""A client that can stop reading, or read slowly, as a strike tells it."""

import asyncio
import socket
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.client import PING_SECONDS, Client

RECEIVES_BYTES = 32 * 1024  # what its kernel takes for it
DAWDLE_SECONDS = 0.02  # between two frames


class SlowClient(Client):
    """Reads like others until it is told not to; its requests are long answers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hears = asyncio.Event()
        self._pause = 0.0
        self.read()

    def read(self) -> None:
        """As fast as it can."""
        self._pause = 0.0
        self._hears.set()

    def dawdle(self) -> None:
        """Slower than the answers come."""
        self._pause = DAWDLE_SECONDS

    def deafen(self) -> None:
        """Nothing at all."""
        self._hears.clear()

    async def _read_on(self) -> None:
        await self._hears.wait()
        if self._pause:
            await asyncio.sleep(self._pause)

    def _manners(self, url: str) -> dict[str, Any]:
        """A small buffer, and pings whose answers it need not read: they find out who is gone."""
        tcp = socket.socket()
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVES_BYTES)
        gateway = urlsplit(url)
        tcp.connect((gateway.hostname, gateway.port))
        return {"sock": tcp, "ping_interval": PING_SECONDS, "ping_timeout": None}
