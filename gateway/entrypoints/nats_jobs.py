"""Jobs over NATS: producers send lines, start batches and read their files without HTTP.

A question is a request to `infer.jobs.<tenant>.<operation>`; whoever may publish there is the
tenant, as the broker's rights say. The operations do what the routes of `/v1/uploads`,
`/v1/batches` and `/v1/files` do.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import orjson
import structlog
from nats.aio.msg import Msg
from pydantic import Field

from api import batch_bodies, file_bodies
from api.schemas.batches import CreateBatch
from api.schemas.fields import Body
from api.schemas.files import CreateUpload
from api.schemas.parsing import decode, parse
from gateway.context import GatewayContext
from gateway.entrypoints.batches.batch_creation import create_batch
from gateway.entrypoints.batches.batch_routes import (
    cancelled_batch,
    change_batch,
    find_batch,
)
from gateway.entrypoints.files.file_routes import find_ready
from gateway.entrypoints.files.upload_routes import add_part, complete_upload, create_upload
from gateway.metrics import JOB_QUESTIONS
from gateway.replies.stored_records import QUEUE, REPLIES
from registry.tenant_records import Tenant
from streams import job_subjects
from streams.errors import (
    BrokerUnavailable,
    Forbidden,
    InternalError,
    MillstreamError,
    NotFound,
    TooManyTransfers,
)
from streams.headers import MAX_HEADER_BYTES
from streams.job_subjects import JobOperation
from streams.records.cas.cas_records import RecordChanged
from streams.records.files.file_records import StoredFile
from streams.records.jobs.batch_records import Batch
from streams.subjects import OTHER

log = structlog.get_logger()

MAX_CONTENT_BYTES = 524_288
# Questions, each of up to `max_payload`, that wait at this gateway: of one tenant, and of all
MAX_WAITING_OF_TENANT, MAX_WAITING = 32, 128
UPLOAD = "Upload"  # of a part: the upload's id
ERROR = "Error"  # of a refusal: its code


class BeginJob(Body):
    """Asks for an upload of so many bytes of lines."""

    bytes: int = Field(ge=1)


class StartJob(CreateBatch):
    """Asks for a batch of the lines in an upload's parts, in this order."""

    input_file_id: str = ""
    upload_id: str
    part_ids: list[str] = Field(min_length=1)


class NamedJob(Body):
    """Names a batch."""

    batch_id: str


class ReadFile(Body):
    """Asks for the bytes of a file from an offset on."""

    file_id: str
    offset: int = Field(0, ge=0)


class _JobQuestion(NamedTuple):
    tenant: Tenant
    headers: Mapping[str, str]
    data: bytes


class _JobAnswer(NamedTuple):
    data: bytes
    headers: dict[str, str] | None = None


class NatsJobs:
    """Answers producers' questions about jobs: those of one tenant one after the other.

    No tenant's wait for another's: an input that is read before its batch is created may be large.
    One gateway answers each question.
    """

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._waiting: dict[str, deque[Msg]] = {}  # by tenant
        self._busy: set[str] = set()  # tenants of which one question is being answered
        self._wake = asyncio.Event()
        self._operations: Mapping[str, Callable[[_JobQuestion], Awaitable[_JobAnswer]]] = {
            JobOperation.BEGIN: self._begin,
            JobOperation.ADD: self._add,
            JobOperation.START: self._start,
            JobOperation.STATUS: self._status,
            JobOperation.CANCEL: self._cancel,
            JobOperation.CONTENT: self._read_content,
        }

    async def open(self) -> None:
        """Take questions from now on, which `run` answers. Raises `BrokerUnavailable`."""
        await self._context.broker.subscribe(job_subjects.ALL_JOBS, self._on_question, queue=QUEUE)

    async def run(self) -> None:
        """Answer questions until cancelled; who then has no answer asks another gateway."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for tenant in self._waiting.keys() - self._busy:
                    self._busy.add(tenant)
                    tasks.create_task(self._answer_all(tenant), name=f"jobs-{tenant}")
                await self._wake.wait()
                self._wake.clear()

    async def _on_question(self, msg: Msg) -> None:
        if not msg.reply.startswith(REPLIES):
            return
        tenant = msg.subject.split(".")[2]
        waiting, known = sum(map(len, self._waiting.values())), self._waiting.get(tenant, ())
        if waiting >= MAX_WAITING or len(known) >= MAX_WAITING_OF_TENANT:
            text = f"{len(known)} questions of the tenant, of {waiting}, wait at this gateway"
            await self._send(msg, _refusal(TooManyTransfers(text)))
        else:
            self._waiting.setdefault(tenant, deque()).append(msg)
            self._wake.set()

    async def _answer_all(self, tenant: str) -> None:
        """Answer a tenant's questions until none is left."""
        questions = self._waiting[tenant]
        while questions:
            msg = questions.popleft()
            await self._send(msg, await self._answer(msg))
        del self._waiting[tenant]
        self._busy.discard(tenant)

    async def _send(self, msg: Msg, answer: _JobAnswer) -> None:
        operation = msg.subject.rpartition(".")[2]
        known = operation if operation in self._operations else OTHER
        JOB_QUESTIONS.labels(known, (answer.headers or {}).get(ERROR, "")).inc()
        try:
            await self._context.broker.publish(msg.reply, answer.data, answer.headers)
        except BrokerUnavailable as error:
            log.warning("job_answer_not_sent", reason=str(error))

    async def _answer(self, msg: Msg) -> _JobAnswer:
        try:
            name, operation = job_subjects.parse_job_question(msg.subject)
            tenant = self._context.tenants.get(name)
            if tenant is None or not tenant.publishes:
                raise Forbidden(f"the tenant {name!r} may not publish")
            if operation not in self._operations:
                known = ", ".join(self._operations)
                raise NotFound(f"{operation!r} is none of the operations: {known}")
            question = _JobQuestion(tenant, msg.headers or {}, msg.data)
            return await self._operations[operation](question)
        except MillstreamError as error:
            return _refusal(error)
        except Exception:  # our own fault: whoever asks must not wait
            log.exception("job_question_failed", subject=msg.subject)
            return _refusal(InternalError("the gateway failed; its log says why"))

    async def _begin(self, question: _JobQuestion) -> _JobAnswer:
        body = parse(BeginJob, decode(question.data))
        upload = CreateUpload(
            filename="lines.jsonl",
            purpose="batch",
            bytes=body.bytes,
            mime_type="application/jsonl",
        )
        stored = await create_upload(self._context, question.tenant, "", upload)
        return _json(file_bodies.upload_object(stored))

    async def _add(self, question: _JobQuestion) -> _JobAnswer:
        told, name = question.headers.get(UPLOAD, ""), question.tenant.name
        with self._context.transfer_slots.take(name):
            part = await add_part(self._context, name, told, question.data)
        return _json({"id": file_bodies.part_id(part.id), "bytes": part.size})

    async def _start(self, question: _JobQuestion) -> _JobAnswer:
        """Complete the upload and create its batch; the same again is the same batch."""
        body, tenant = parse(StartJob, decode(question.data)), question.tenant
        file = await complete_upload(self._context, tenant.name, body.upload_id, body.part_ids)
        batch = await self._context.batches.find(tenant.name, file.id)
        if batch is None:
            batch = await self._create(tenant, file, body)
        return self._shown(batch)

    async def _create(self, tenant: Tenant, file: StoredFile, body: StartJob) -> Batch:
        """Create the batch of an upload; its id is the file's, so that there is only one."""
        try:
            return await create_batch(self._context, tenant, "", file.id, file, body.endpoint, body)
        except RecordChanged:
            return await find_batch(self._context, tenant.name, batch_bodies.batch_id_of(file.id))

    async def _status(self, question: _JobQuestion) -> _JobAnswer:
        told = parse(NamedJob, decode(question.data)).batch_id
        return self._shown(await find_batch(self._context, question.tenant.name, told))

    async def _cancel(self, question: _JobQuestion) -> _JobAnswer:
        told, tenant = parse(NamedJob, decode(question.data)).batch_id, question.tenant.name
        return self._shown(await change_batch(self._context, tenant, told, cancelled_batch))

    def _shown(self, batch: Batch) -> _JobAnswer:
        return _json(batch_bodies.batch_object(batch, self._context.broker.clock.now()))

    async def _read_content(self, question: _JobQuestion) -> _JobAnswer:
        body, name = parse(ReadFile, decode(question.data)), question.tenant.name
        file = await find_ready(self._context, name, body.file_id)
        room = self._context.broker.max_payload - MAX_HEADER_BYTES
        end = min(file.size, body.offset + min(MAX_CONTENT_BYTES, room))
        with self._context.transfer_slots.take(name):
            pieces = [piece async for piece in self._context.files.read(file, body.offset, end)]
        return _JobAnswer(b"".join(pieces), {"Size": str(file.size)})


def _json(body: Mapping[str, Any]) -> _JobAnswer:
    return _JobAnswer(orjson.dumps(body))


def _refusal(error: MillstreamError) -> _JobAnswer:
    told = {"error": {"code": error.code, "message": str(error)}}
    return _JobAnswer(orjson.dumps(told), {ERROR: error.code})
