"""A server of a tenant's on a real socket, which takes webhooks and answers as a test has told."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

LOOPBACK = ("127.0.0.0/8",)


@dataclass(frozen=True)
class ReceivedWebhook:
    """One webhook as it came; header names in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


# What is answered: a status, or a whole head of an answer; None: nothing, for as long as it is open
Respond = Callable[[ReceivedWebhook], int | str | None]


@dataclass
class WebhookReceiver:
    """All webhooks that have come, in order, and how they are answered."""

    port: int = 0
    respond: Respond = lambda received: 204
    received: list[ReceivedWebhook] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks?of=acme"

    @property
    def ids(self) -> Counter[str]:
        """Number of times that each webhook came, by its id."""
        return Counter(each.id for each in self.received)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            pairs = (line.partition(": ") for line in head[1:] if line)
            headers = {name.lower(): value for name, _, value in pairs}
            body = await reader.readexactly(int(headers["content-length"]))
            webhook = ReceivedWebhook(head[0].split()[1], headers, body)
            self.received.append(webhook)
            answer = self.respond(webhook)
            if answer is None:
                await reader.read()  # until the sender leaves
                return
            told = answer if isinstance(answer, str) else f"{answer} Whatever"
            writer.write(f"HTTP/1.1 {told}\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def webhook_receiver(respond: Respond | None = None) -> AsyncIterator[WebhookReceiver]:
    """A receiver that listens; it takes everything unless it is told otherwise."""
    receiver = WebhookReceiver()
    if respond:
        receiver.respond = respond
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
