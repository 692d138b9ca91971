"""The embedded nats-server's health, asked as a user of its system account."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats.errors

from streams.broker.reconnecting_client import ReconnectingClient
from streams.connection_files import ConnectionFiles

HEALTH_SECONDS = 2.0
_SUBJECT = "$SYS.REQ.SERVER.PING.HEALTHZ"


class BrokerHealth:
    """Asks a nats-server for its health; obtained from `connect_health`."""

    def __init__(self, client: ReconnectingClient) -> None:
        self._client = client

    async def fetch_error(self) -> str | None:
        """Return the error that the server reports of itself: empty if it is healthy.

        Returns None if it does not answer within 2 s; raises nothing.
        """
        try:
            reply = await self._client.client.request(_SUBJECT, timeout=HEALTH_SECONDS)
        except (nats.errors.Error, TimeoutError, OSError):
            return None
        status = json.loads(reply.data)["data"]
        return "" if status["status"] == "ok" else str(status.get("error") or status)


@asynccontextmanager
async def connect_health(url: str, creds: Path) -> AsyncIterator[BrokerHealth]:
    """Connect as a user of the system account, and stay connected; raises `BrokerUnavailable`."""
    client = ReconnectingClient(url, "millstream-up", ConnectionFiles(creds=creds))
    await client.open()
    keeping = asyncio.create_task(client.run(), name="health-connection")
    try:
        yield BrokerHealth(client)
    finally:
        keeping.cancel()
        await client.close()
