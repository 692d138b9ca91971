"""A gateway that says what it is told to, and a client of it."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

from millstream_client import Client

TEXT_SIZE = 100_000  # of a text; three are more than a reader may leave unread
Frame = dict[str, Any]
DONE: Frame = {
    "type": "done",
    "finish_reason": "length",
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    "timing": {},
}


class FakeGatewaySocket:
    """A gateway's end of one socket."""

    def __init__(self, connection: ServerConnection, heard: list[Frame]) -> None:
        self.connection, self._heard = connection, heard

    async def receive(self) -> Frame:
        """The next frame of the client."""
        self._heard.append(json.loads(await self.connection.recv()))
        return self._heard[-1]

    async def send(self, *frames: Frame) -> None:
        for frame in frames:
            await self.connection.send(json.dumps(frame))

    async def answer(self, id: str, *, first: int = 0, until: int = 3) -> None:
        """Accept, so many tokens, the end."""
        await self.send(accepted_frame(id))
        await self.send(
            *(chunk_frame(id, index) for index in range(first, until)), {**DONE, "id": id}
        )


def accepted_frame(id: str) -> Frame:
    return {"type": "accepted", "id": id, "request_id": "r"}


def chunk_frame(id: str, index: int, text: str = "x") -> Frame:
    return {"type": "chunk", "id": id, "index": index, "count": 1, "text": text}


def error_frame(id: str, code: str, **facts: Any) -> Frame:
    return {"type": "error", "id": id, "code": code, "message": "no", **facts}


Script = Callable[[FakeGatewaySocket], Awaitable[None]]


class FakeGateway:
    """Answers its first socket by the first script, and so on; `heard` is all that was sent."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = iter(scripts)
        self.received: list[Frame] = []
        self.url = ""

    async def serve(self, connection: ServerConnection) -> None:
        await next(self._scripts)(FakeGatewaySocket(connection, self.received))
        await connection.wait_closed()


@asynccontextmanager
async def running_fake_gateway(*scripts: Script, **options: Any) -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway(*scripts)
    async with serve(gateway.serve, "127.0.0.1", 0, **options) as server:
        gateway.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        yield gateway


def client_of(*gateways: FakeGateway, **options: Any) -> Client:
    return Client([gateway.url for gateway in gateways], api_key="sk", **options)


async def generate_text(client: Client, prompt: str = "p") -> str:
    return await client.generate(model="m", prompt=prompt).text()


async def abort_connection(peer: FakeGatewaySocket) -> None:
    peer.connection.transport.abort()
