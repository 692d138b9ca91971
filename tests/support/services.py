"""Services of a test but the gateway, in this process, over a real broker."""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

from nats.aio.msg import Msg

import admin.service
from admin.settings import AdminSettings
from dispatcher.settings import DispatcherSettings
from gpu_worker.settings import WorkerSettings
from jobs.settings import JobsSettings
from registry.models import Model, mock_model
from registry.store import Registry
from streams import messages, prefix_hashes, subjects, topology
from streams.accounts.access import UserClass
from streams.base_settings import new_id
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.headers import MESSAGE_ID, Envelope
from streams.messages import LedgerRecord, Request, Sampling
from streams.records import request_queue, token_log
from streams.records.log_contents import LogContents
from streams.subjects import Lane, LogAddress, PoolKey, Priority
from streams.topology import Scale
from tests.support.accounts_server import connect, process_files, process_settings, worker_pins
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.versions import make_version

ROUTE = "test"
MAX_QUEUED = 100_000


@asynccontextmanager
async def running(service: Any, settings: Any) -> AsyncIterator[asyncio.Event]:
    """A service's `run` as a task; stopped in order at the end."""
    stop = asyncio.Event()
    task = asyncio.create_task(service.run(settings, stop))
    try:
        yield stop
        stop.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await task
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE_SECONDS)


class BrokerClient:
    """Queues requests as a gateway does, and collects the replies of its route."""

    def __init__(self, broker: Broker, registry: Registry) -> None:
        self.broker, self.registry = broker, registry
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.tenants: dict[str, str] = {}
        self._heard: set[tuple[str, str | None, bytes]] = set()

    async def open(self) -> None:
        await self.broker.subscribe(subjects.replies_to(ROUTE), self._on_reply)

    async def _on_reply(self, msg: Msg) -> None:
        """Keep a record, unless it is one that has come twice: a subscription may be renewed."""
        request_id = subjects.parse_log(msg.subject).request_id
        stored = (msg.subject, (msg.headers or {}).get("Nats-Sequence"), msg.data)
        if stored in self._heard:
            return
        self._heard.add(stored)
        self.records.setdefault(request_id, []).append(messages.unpack(msg.data))

    def envelope(
        self,
        prompt_tokens: int,
        max_tokens: int,
        *,
        tenant: str = "acme",
        version: str = "",
        deadline_seconds: float = 60,
    ) -> Envelope:
        now = self.broker.clock.now_ms()
        return Envelope(
            request_id=secrets.token_hex(16),
            tenant=tenant,
            route=ROUTE,
            cost=prompt_tokens + max_tokens,
            prompt_tokens=prompt_tokens,
            deadline=now + int(deadline_seconds * 1000),
            accepted=now,
            version=version,
        )

    async def send(
        self,
        prompt: str = "hello",
        *,
        tenant: str = "acme",
        model: str = "mock",
        version: str = "",
        tokenized_for: str = "",
        priority: Priority = Priority.STANDARD,
        deadline_seconds: float = 60,
        **sampling: Any,
    ) -> str:
        tokens = list(prompt.encode())
        chosen = Sampling(**{"max_tokens": 8, "temperature": 0.0, **sampling})
        envelope = self.envelope(
            len(tokens),
            chosen.max_tokens,
            tenant=tenant,
            version=version,
            deadline_seconds=deadline_seconds,
        )
        packed = messages.pack_tokens(tokens)
        found = prefix_hashes.to_header(
            prefix_hashes.hash_prompt(packed, prefix_hashes.make_salt(tenant))
        )
        envelope = replace(envelope, prefix_hashes=found, tokenized_for=tokenized_for)
        payload = Request("generate", packed, sampling=chosen).pack()
        return await self.enqueue(envelope, payload, Lane(tenant, model, priority))

    async def embed(self, inputs: list[str], dimensions: int) -> str:
        tokens = [list(each.encode()) for each in inputs]
        envelope = self.envelope(sum(map(len, tokens)), 0)
        packed = [messages.pack_tokens(each) for each in tokens]
        payload = Request("embed", inputs=packed, dimensions=dimensions).pack()
        return await self.enqueue(envelope, payload, Lane("acme", "mock", Priority.STANDARD))

    async def enqueue(self, envelope: Envelope, payload: bytes, lane: Lane) -> str:
        self.tenants[envelope.request_id] = envelope.tenant
        headers = envelope.to_headers() | {MESSAGE_ID: envelope.request_id}
        await request_queue.enqueue(self.broker, lane, payload, headers, 2)
        return envelope.request_id

    async def publish_work(self, envelope: Envelope, payload: bytes) -> str:
        """Put a request into WORK, as a dispatcher would."""
        headers = envelope.to_headers() | {MESSAGE_ID: envelope.request_id}
        subject = subjects.work(PoolKey("mock", "1", Priority.STANDARD))
        await self.broker.store(subject, payload, headers)
        return envelope.request_id

    async def cancel(self, request_id: str) -> None:
        tenant = self.tenants[request_id]
        await self.broker.store(subjects.cancel(tenant, request_id), b"")

    def terminal(self, request_id: str) -> dict[str, Any] | None:
        last = self.records.get(request_id, [{"type": ""}])[-1]
        return last if last["type"] in messages.TERMINAL_TYPES else None

    def text(self, request_id: str) -> str:
        chunks = (r for r in self.records[request_id] if r["type"] == "chunk")
        return "".join(chunk["text"] for chunk in chunks)

    def tokens(self, request_id: str) -> list[int]:
        chunks = (r for r in self.records[request_id] if r["type"] == "chunk")
        return [token for chunk in chunks for token in chunk["tokens"]]

    def record_counts(self, request_id: str) -> Counter[str]:
        """How many records of each type were seen."""
        return Counter(record["type"] for record in self.records.get(request_id, []))

    def attempts(self, request_id: str) -> list[int]:
        records = self.records.get(request_id, [])
        return [record["attempt"] for record in records if record["type"] == "started"]

    async def ledger(self) -> list[LedgerRecord]:
        """All ledger records so far."""
        stored = await self.broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
        return [LedgerRecord.unpack(message.data) for message in stored]

    async def ledger_counts(self) -> Counter[str]:
        """How many ledger records each request has, once all that have ended have one.

        A request's ledger record is stored behind its terminal.
        """
        counts = Counter[str]()

        async def is_settled() -> bool:
            counts.clear()
            counts.update(record.request_id for record in await self.ledger())
            return all(counts[request] for request in self.records if self.terminal(request))

        await eventually(is_settled)
        return counts

    async def read_log(self, request_id: str) -> LogContents:
        """The token log as it is stored."""
        stream = topology.token_stream_of(request_id, 1)
        address = LogAddress(self.tenants.get(request_id, "acme"), ROUTE, request_id)
        stored = await self.broker.read_subject(stream, subjects.log(address, 1))
        return token_log.decode_contents(stored)

    async def message_count(self, stream: str) -> int:
        """Messages in a stream."""
        info = await self.broker.js.stream_info(stream)
        return int(info.state.messages)

    async def is_idle(self) -> bool:
        """True when nothing is queued and nothing is in flight any more."""
        try:
            return not await self.message_count(topology.REQUESTS) and not await self.message_count(
                topology.WORK
            )
        except TimeoutError:
            return False

    async def report(self, model: str = "mock") -> dict[str, Any] | None:
        """What the leader of a model says; None while there is none."""
        answer = await self.broker.request(subjects.report(model), seconds=0.3)
        return json.loads(answer) if answer else None


def broker_client(
    nats_url: str, *, lease_seconds: float = 2, **mock: Any
) -> AbstractAsyncContextManager[BrokerClient]:
    """A declared topology with a mock model, and a client of it."""
    return broker_client_of(nats_url, mock_model(**mock), lease_seconds=lease_seconds)


@asynccontextmanager
async def broker_client_of(
    nats_url: str, model: Model, *, lease_seconds: float = 2
) -> AsyncIterator[BrokerClient]:
    """A declared topology with one model, and a client of it."""
    async with connect(nats_url, "test") as broker:
        # A lane of a test may be longer than any tenant's; the admin service lowers no limit
        await declaration.declare(broker, Scale(), MAX_QUEUED)
        settings = admin_settings(nats_url, lease_seconds=lease_seconds)
        async with running(admin.service, settings), opened_registry(broker) as registry:
            await registry.add_model(model)
            client = BrokerClient(broker, registry)
            await client.open()
            yield client


@asynccontextmanager
async def opened_registry(broker: Broker) -> AsyncIterator[Registry]:
    """The registry, of which an admin service makes the bucket."""
    registry = await Registry.open(broker, seconds=PATIENCE_SECONDS)
    try:
        yield registry
    finally:
        await registry.close()


def model_with_versions(*ids: str, **mock: Any) -> Model:
    """A mock model with several versions, the first of which is the default."""
    made = {name: make_version(name, options=mock) for name in ids}
    update = {"versions": made, "default_version": ids[0]}
    return mock_model().model_copy(update=update)


def always() -> bool:
    """Where a view of a bucket is its own declarer: a test of records, without any service."""
    return True


def command_settings(
    nats_url: str, user_class: UserClass = UserClass.OPERATOR, **settings: Any
) -> dict[str, Any]:
    """Settings of a command: where the broker is, and credentials of an operator."""
    creds = process_settings(nats_url, user_class, str(user_class))
    return {"nats": nats_url, **creds, **settings}


def connect_worker(
    nats_url: str, worker: str, models: Sequence[str] = ("mock",)
) -> AbstractAsyncContextManager[Broker]:
    """A connection by which a test plays a worker."""
    files = process_files(nats_url, UserClass.WORKER, worker, worker_pins(worker, models))
    return connect(nats_url, worker, files)


def connect_operator(nats_url: str) -> AbstractAsyncContextManager[Broker]:
    """A connection by which a test plays an operator's command."""
    files = process_files(nats_url, UserClass.OPERATOR, "operator")
    return connect(nats_url, "operator", files)


def service_settings(
    nats_url: str, user_class: UserClass, models: Sequence[str] = (), **settings: Any
) -> dict[str, Any]:
    """Settings of a service: where the broker is, and credentials of this process alone."""
    told = {"id": new_id(), **settings}
    pins = worker_pins(told["id"], models) if models else None
    creds = process_settings(nats_url, user_class, told["id"], pins)
    return {"nats": nats_url, **creds, **told}


def admin_settings(nats_url: str, **settings: Any) -> AdminSettings:
    return AdminSettings(**service_settings(nats_url, UserClass.ADMIN, **settings))


def dispatcher_settings(nats_url: str, **settings: Any) -> DispatcherSettings:
    return DispatcherSettings(**service_settings(nats_url, UserClass.DISPATCHER, **settings))


def jobs_settings(nats_url: str, **settings: Any) -> JobsSettings:
    creds = process_settings(nats_url, UserClass.JOBS, "jobs")
    return JobsSettings(nats=nats_url, **{**creds, **settings})


def worker_settings(nats_url: str, **settings: Any) -> WorkerSettings:
    told = {"model": ("mock",), **settings}
    return WorkerSettings(**service_settings(nats_url, UserClass.WORKER, told["model"], **told))
