"""`/v1/batches/{id}/retry`, ours: the failed lines of a batch that has ended, as a new batch."""

from collections.abc import AsyncIterator
from functools import partial
from secrets import token_hex

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api import batch_bodies, file_bodies
from api.authentication.authenticator import Principal
from api.batches.batch_line import InputLine, parse_line
from api.batches.input_lines import iterate_lines
from api.schemas.batches import BatchOptions
from api.schemas.parsing import decode, parse
from gateway.context import GatewayContext
from gateway.entrypoints.batches.batch_creation import create_batch
from gateway.entrypoints.batches.batch_routes import find_batch
from gateway.entrypoints.endpoint import read_body_in_time, request_key
from gateway.entrypoints.files.transfers import transfer
from gateway.entrypoints.plain_responses import render_json
from streams.errors import BadRequest, NotFound
from streams.records.files.file_records import FilePart, StoredFile
from streams.records.jobs.batch_records import Batch


def build_routes(context: GatewayContext) -> list[BaseRoute]:
    """Return the route of retries."""
    return [Route("/v1/batches/{batch}/retry", partial(_retry, context), methods=["POST"])]


async def _retry(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    context.check_not_draining()
    data = await read_body_in_time(request, context.settings.max_body_bytes)
    options = parse(BatchOptions, decode(data) if data else {})
    batch = await find_batch(context, principal.tenant.name, request.path_params["batch"])
    if not batch.error_file:
        status = batch.status.value
        raise BadRequest(f"the batch has no failed lines to retry: it is {status!r}", "batch_id")
    source = await _find(context, batch, batch.input_file, "input")
    errors = await _find(context, batch, batch.error_file, "error")
    file = await _write_input(context, principal, batch, source, errors)
    key, name = principal.key.model_dump_json(), token_hex(12)
    made = await create_batch(
        context, principal.tenant, key, name, file, batch.endpoint, options, batch.id
    )
    return render_json(batch_bodies.batch_object(made, context.broker.clock.now()))


async def _find(context: GatewayContext, batch: Batch, file_id: str, kind: str) -> StoredFile:
    found = await context.files.find(batch.tenant, file_id)
    if found is None:
        raise NotFound(f"the {kind} file of this batch was deleted, or its time is over")
    return found


async def _write_input(
    context: GatewayContext,
    principal: Principal,
    batch: Batch,
    source: StoredFile,
    errors: StoredFile,
) -> StoredFile:
    """Store the failed lines of a batch as a file of the tenant's.

    Raises `StorageQuotaExceeded` or `StorageFull`.
    """
    name, now = token_hex(12), int(context.broker.clock.now())
    record = StoredFile(
        tenant=batch.tenant,
        id=name,
        filename=f"{batch.id}_retry.jsonl",
        purpose=file_bodies.BATCH,
        created_at=now,
        size=source.size,
        expires_at=now + file_bodies.UPLOAD_SECONDS,
        expires_after_seconds=file_bodies.expiry_of(file_bodies.BATCH, None),
        parts=(FilePart(name),),
        key=principal.key.id,
    )
    with transfer(context, principal) as check:
        file = await context.files.create(record, principal.tenant.max_stored_bytes)
        async with context.files.write_part(batch.tenant, name) as writer:
            async for line in _iterate_failed(context, batch, source, errors):
                check()
                await writer.write(line)
            part = await writer.finish()
    return await context.files.change(file, lambda it: it.as_ready((part,)))


async def _iterate_failed(
    context: GatewayContext, batch: Batch, source: StoredFile, errors: StoredFile
) -> AsyncIterator[bytes]:
    """Yield the lines of the input that are in the error file; both have the same order."""
    failed = iterate_lines(context.files, errors)
    wanted = await _next_id(failed)
    async for line in iterate_lines(context.files, source):
        assert line.data, "checked before the batch began"
        if parse_line(line.data, batch.endpoint).custom_id == wanted:
            yield line.data + b"\n"
            wanted = await _next_id(failed)


async def _next_id(failed: AsyncIterator[InputLine]) -> str | None:
    line = await anext(failed, None)
    return None if line is None else str(orjson.loads(line.data or b"")["custom_id"])
