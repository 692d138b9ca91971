"""Gateways of a test, in this process, with a dispatcher and a mock worker behind them."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import msgpack
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

import admin.service
import dispatcher.service
import gateway.service
import gpu_worker.service
from gateway.settings import GatewaySettings
from registry.models import Model, mock_model
from registry.store import Registry
from streams.accounts.access import UserClass
from streams.base_settings import TenantSettings
from streams.broker.countdown import running_timeout
from tests.support.accounts_server import connect as connect_nats
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.ports import free_port
from tests.support.services import (
    admin_settings,
    always,
    dispatcher_settings,
    running,
    service_settings,
    worker_settings,
)
from tests.support.versions import make_version

KEY, OTHER_KEY = "sk-acme", "sk-other"
JSON, MSGPACK = "millstream.v1.json", "millstream.v1.msgpack"
QUICK = {"ttft_ms": 1, "itl_ms": 1}


def tenants(**acme: Any) -> dict[str, TenantSettings]:
    """Two tenants with a key each; the options are for the first, `acme`."""
    return {
        "acme": TenantSettings(keys=(KEY,), **{"publishes": True, **acme}),
        "other": TenantSettings(keys=(OTHER_KEY,)),
    }


def vectors_model() -> Model:
    """A mock model that embeds."""
    version = make_version(options=QUICK, context_length=512, embedding_dimensions=8)
    return Model(
        name="vectors",
        engine="mock",
        task="embed",
        versions={version.id: version},
        default_version=version.id,
    )


@dataclass(frozen=True)
class HttpResponse:
    """A whole HTTP answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The maps of an event stream, without its `[DONE]`."""
        lines = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @property
    def text(self) -> str:
        """What a completion says, streamed or whole."""
        answers = self.events if "event-stream" in self.headers["content-type"] else [self.json]
        return "".join(choice["text"] for a in answers for choice in a["choices"])


class HttpExchange:
    """One HTTP request on a connection of its own, read as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status, self.headers = 0, dict[str, str]()

    async def read_head(self) -> Self:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(head[0].split()[1])
        pairs = (line.partition(": ") for line in head[1:] if line)
        self.headers = {name.lower(): value for name, _, value in pairs}
        return self

    async def read_chunk(self) -> bytes:
        """The next piece of a chunked body; empty at its end."""
        size = int(await self._reader.readline(), 16)
        data = await self._reader.readexactly(size)
        await self._reader.readexactly(2)
        return data

    async def read_body(self) -> bytes:
        if "content-length" in self.headers:
            return await self._reader.readexactly(int(self.headers["content-length"]))
        body = b""
        while chunk := await self.read_chunk():
            body += chunk
        return body

    def write(self, data: bytes) -> None:
        """Send more of the body."""
        self._writer.write(data)

    def abort(self) -> None:
        """Drop the connection."""
        self._writer.transport.abort()


class GatewaySocket:
    """A WebSocket client that speaks frames."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self._packs = connection.subprotocol == MSGPACK

    async def send(self, **frame: Any) -> None:
        packed = msgpack.packb(frame) if self._packs else json.dumps(frame)
        await self.connection.send(packed)

    async def generate(self, id: str, prompt: str = "hello", **options: Any) -> None:
        await self.send(type="generate", id=id, model="mock", prompt=prompt, **options)

    async def receive(self, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        async with running_timeout(seconds):
            data = await self.connection.recv()
        frame: dict[str, Any] = msgpack.unpackb(data) if self._packs else json.loads(data)
        return frame

    async def receive_until(
        self, id: str, *types: str, seconds: float = PATIENCE_SECONDS
    ) -> list[dict[str, Any]]:
        """The frames of one request up to the first of these types; others' are dropped."""
        found: list[dict[str, Any]] = []
        async with running_timeout(seconds):
            while not found or found[-1]["type"] not in types:
                frame = await self.receive(seconds)
                found += [frame] if frame.get("id") == id else []
        return found

    async def receive_rest(
        self, id: str, seconds: float = PATIENCE_SECONDS
    ) -> list[dict[str, Any]]:
        """The rest of one request's frames."""
        return await self.receive_until(id, "done", "error", "result", seconds=seconds)


def text_of(frames: list[dict[str, Any]]) -> str:
    return "".join(frame["text"] for frame in frames if frame["type"] == "chunk")


def token_indices(frames: list[dict[str, Any]]) -> list[int]:
    """The indices of all tokens, as they came."""
    chunks = (frame for frame in frames if frame["type"] == "chunk")
    return [i for chunk in chunks for i in range(chunk["index"], chunk["index"] + chunk["count"])]


class RunningGateway:
    """A running gateway as its clients see it."""

    def __init__(self, port: int, stop: asyncio.Event, tls: ssl.SSLContext | None = None) -> None:
        self.port, self.stop, self.tls = port, stop, tls
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"

    def with_tls(self, tls: ssl.SSLContext | None) -> Self:
        """The same gateway as another client sees it."""
        return type(self)(self.port, self.stop, tls)

    async def connect(
        self, connection: socket.socket | None = None, limit: int = 65_536
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which nothing was sent, over a socket or a new one; TLS is spoken.

        While nobody reads, a little more than `limit` bytes are kept.
        """
        if connection is None:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.port, limit=limit, ssl=self.tls
            )
        else:
            hostname = "127.0.0.1" if self.tls else None
            reader, writer = await asyncio.open_connection(
                sock=connection, limit=limit, ssl=self.tls, server_hostname=hostname
            )
        limit_tls_buffer(writer.transport, limit)
        return reader, writer

    async def open(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = KEY,
        headers: Mapping[str, str] | None = None,
    ) -> HttpExchange:
        """Send a request; `body` is sent as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else b"" if body is None else _dumps(body)
        lines = {"Host": "localhost", **(headers or {})}
        if "Transfer-Encoding" not in lines:
            lines.setdefault("Content-Length", str(len(data)))
        if key is not None:
            lines["Authorization"] = f"Bearer {key}"
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        reader, writer = await self.connect()
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        return HttpExchange(reader, writer)

    async def request(
        self, method: str, path: str, body: object = None, **options: Any
    ) -> HttpResponse:
        """A request and its whole answer."""
        exchange = await self.open(method, path, body, **options)
        try:
            await exchange.read_head()
            return HttpResponse(exchange.status, exchange.headers, await exchange.read_body())
        finally:
            exchange.abort()

    async def complete(
        self,
        prompt: object = "hello",
        *,
        key: str | None = KEY,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> HttpResponse:
        """A completion of the mock model."""
        wanted = {"model": "mock", "prompt": prompt, "max_tokens": 8, **body}
        return await self.request("POST", "/v1/completions", wanted, key=key, headers=headers)

    @asynccontextmanager
    async def socket(
        self,
        subprotocol: str | None = JSON,
        *,
        key: str | None = KEY,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> AsyncIterator[GatewaySocket]:
        url = f"{self.url.replace('http', 'ws', 1)}/v1/stream"
        names = [Subprotocol(subprotocol)] if subprotocol else None
        headers = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})}
        if self.tls:
            options["ssl"] = self.tls
        told = {"close_timeout": 0.5, "subprotocols": names, **options}
        async with connect(url, additional_headers=headers, **told) as connection:
            yield GatewaySocket(connection)

    async def answers(self) -> bool:
        try:
            return (await self.request("GET", "/healthz", key=None)).status == 200
        except (OSError, asyncio.IncompleteReadError):
            return False

    async def is_ready(self) -> bool:
        try:
            return (await self.request("GET", "/readyz", key=None)).status == 200
        except (OSError, asyncio.IncompleteReadError):
            return False

    async def knows_key(self) -> bool:
        """Return True once the gateway serves and knows its tenants."""
        try:
            return (await self.request("GET", "/v1/models")).status == 200
        except (OSError, asyncio.IncompleteReadError):
            return False

    async def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        text = (await self.request("GET", "/metrics", key=None)).body.decode()
        (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
        return float(line.split()[1])

    async def followed_requests(self) -> float:
        """How many requests it relays."""
        return await self.metric("millstream_followed_requests")


def limit_tls_buffer(transport: Any, limit: int) -> None:
    """Bound what a client with TLS keeps while it is not read, which is 256 KiB otherwise."""
    if transport.get_extra_info("ssl_object"):
        transport.set_read_buffer_limits(limit)


def _dumps(body: object) -> bytes:
    return json.dumps(body).encode()


_ADMIN_SETTINGS = {"tenants", "ledger_bytes", "ledger_days", "files_bytes", "results_bytes"}


def gateway_settings(nats_url: str, **settings: Any) -> GatewaySettings:
    own = {"port": free_port(), **settings}
    return GatewaySettings(**service_settings(nats_url, UserClass.GATEWAY, **own))


@asynccontextmanager
async def gateways(
    nats_url: str, count: int = 1, *, tls: ssl.SSLContext | None = None, **settings: Any
) -> AsyncIterator[list[RunningGateway]]:
    """Gateways that know their tenants, the admin service that declares these, and nothing more.

    `tls` is what the gateways' clients connect with.
    """
    settings = {"drain_seconds": 5, **settings}
    told = {name: settings.pop(name) for name in _ADMIN_SETTINGS & settings.keys()}
    told = {"tenants": tenants(), **told}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(admin.service, admin_settings(nats_url, **told)))
        found = []
        for _ in range(count):
            made = gateway_settings(nats_url, **settings)
            stop = await stack.enter_async_context(running(gateway.service, made))
            found.append(RunningGateway(made.port, stop, tls))
        has_key = any(
            key.key.get_secret_value() == KEY for t in told["tenants"].values() for key in t.keys
        )
        for each in found:
            await eventually(each.knows_key if has_key else each.answers)
        yield found


async def register(nats_url: str, **mock: Any) -> None:
    """The models `mock` and `vectors`."""
    async with connect_nats(nats_url, "test") as broker:
        registry = await Registry.open(broker, declares=always)
        await registry.add_model(mock_model("mock", **{**QUICK, **mock}))
        await registry.add_model(vectors_model())
        await registry.close()


@asynccontextmanager
async def cell(
    nats_url: str, count: int = 1, *, mock: Mapping[str, float] | None = None, **settings: Any
) -> AsyncIterator[list[RunningGateway]]:
    """Gateways with everything behind them, ready to serve."""
    await register(nats_url, **(mock or {}))
    async with (
        gateways(nats_url, count, **settings) as found,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url, model=("mock", "vectors"))),
    ):
        for each in found:
            await eventually(each.is_ready)
        yield found


@asynccontextmanager
async def cell_with_model(nats_url: str, model: Model) -> AsyncIterator[RunningGateway]:
    """A gateway with one model and a worker of it behind it, ready to serve."""
    async with connect_nats(nats_url, "test") as broker:
        registry = await Registry.open(broker, declares=always)
        await registry.add_model(model)
        await registry.close()
    async with (
        gateways(nats_url) as (found,),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url, model=(model.name,))),
    ):
        await eventually(found.is_ready)
        yield found
