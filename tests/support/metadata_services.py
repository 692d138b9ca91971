"""Metadata services of AWS, GCP and Azure on real sockets, which behave as these document."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Question:
    """A request as it came; header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.target).query).items()}


@dataclass(frozen=True)
class Reply:
    """Status, body and headers of an answer."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def pack(self) -> bytes:
        lines = {**self.headers, "Content-Length": str(len(self.body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"HTTP/1.1 {self.status} Whatever\r\n{head}\r\n".encode() + self.body


class MetadataService:
    """Answers questions as `reply` says, or wrongly while `fault` says how.

    `fault` is a status, bytes to send instead of an answer, or None: nothing, until the caller
    leaves.
    """

    def __init__(self) -> None:
        self.port = 0
        self.is_faulty = False
        self.fault: int | bytes | None = None
        self.questions: list[Question] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fail(self, fault: int | bytes | None) -> None:
        self.is_faulty, self.fault = True, fault

    async def reply(self, question: Question) -> Reply:
        raise NotImplementedError

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = await _read(reader)
            self.questions.append(question)
            if not self.is_faulty:
                writer.write((await self.reply(question)).pack())
            elif self.fault is None:
                await reader.read()
            else:
                fault = self.fault
                writer.write(fault if isinstance(fault, bytes) else Reply(fault).pack())
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Question:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, target, _ = head[0].split()
    pairs = (line.partition(": ") for line in head[1:] if line)
    headers = {name.lower(): value for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Question(method, target, headers, body)


class AwsService(MetadataService):
    """IMDSv2: every document needs a token, and 404 stands for one that there is not."""

    def __init__(self) -> None:
        super().__init__()
        self.token = "token-1"
        self.documents: dict[str, bytes] = {}

    async def reply(self, question: Question) -> Reply:
        if question.path == "/latest/api/token":
            seconds = int(question.headers["x-aws-ec2-metadata-token-ttl-seconds"])
            right = question.method == "PUT" and 1 <= seconds <= 21600
            return Reply(200, self.token.encode()) if right else Reply(400)
        if question.headers.get("x-aws-ec2-metadata-token") != self.token:
            return Reply(401)
        document = self.documents.get(question.path.removeprefix("/latest/meta-data/"))
        return Reply(404) if document is None else Reply(200, document)


class GcpService(MetadataService):
    """`instance/preempted`, whose changes can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.preempted = b"FALSE"
        self._changed = asyncio.Event()

    @property
    def _etag(self) -> str:
        return f"etag-of-{self.preempted.decode()}"

    def preempt(self) -> None:
        self.preempted = b"TRUE"
        self._changed.set()

    async def reply(self, question: Question) -> Reply:
        if question.headers.get("metadata-flavor") != "Google":
            return Reply(403)
        if question.path != "/computeMetadata/v1/instance/preempted":
            return Reply(404)
        query = question.query
        if query.get("wait_for_change") == "true" and query.get("last_etag", "") == self._etag:
            try:
                async with asyncio.timeout(float(query["timeout_sec"])):
                    await self._changed.wait()
            except TimeoutError:
                pass
        flavor = {"Metadata-Flavor": "Google", "ETag": self._etag}
        return Reply(200, self.preempted, flavor)


class AzureService(MetadataService):
    """Scheduled events of a set of machines, of which this is one."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "worker_3"
        self.events: list[dict[str, Any]] = []
        self.started: list[str] = []  # ids of events that were acknowledged

    def schedule(self, kind: str, machine: str, not_before: str, id: str = "event-1") -> None:
        self.events.append(
            {
                "EventId": id,
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": [machine],
                "EventStatus": "Scheduled" if not_before else "Started",
                "NotBefore": not_before,
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )

    async def reply(self, question: Question) -> Reply:
        if question.headers.get("metadata", "").lower() != "true":
            return Reply(400)
        if question.path == "/metadata/instance/compute/name":
            return Reply(200, self.name.encode())
        if question.path != "/metadata/scheduledevents" or "api-version" not in question.query:
            return Reply(404)
        if question.method == "POST":
            self.started += [e["EventId"] for e in json.loads(question.body)["StartRequests"]]
            return Reply()
        return Reply(200, json.dumps({"DocumentIncarnation": 1, "Events": self.events}).encode())


@asynccontextmanager
async def metadata_service(service: MetadataService) -> AsyncIterator[MetadataService]:
    """The service, listening on a port of its own."""
    serve: Callable[..., Awaitable[None]] = service.serve
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    service.port = server.sockets[0].getsockname()[1]
    try:
        yield service
    finally:
        server.close()
