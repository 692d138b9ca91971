"""`/v1/batches`: create, show, list and cancel batches, as the OpenAI SDK does.

Pausing and resuming are ours.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from secrets import token_bytes, token_hex

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api import batch_bodies, file_bodies
from api.openai_bodies import page_body
from api.schemas.batches import CreateBatch
from api.schemas.files import MAX_EXPIRY_SECONDS
from api.schemas.parsing import decode, parse
from gateway.context import GatewayContext
from gateway.entrypoints.endpoint import read_body_in_time, request_key
from gateway.entrypoints.files.file_routes import find_ready
from gateway.entrypoints.plain_responses import cut_page, render_json
from streams.errors import BadRequest
from streams.records.jobs.batch_records import Batch, BatchStatus

log = structlog.get_logger()

DEFAULT_PAGE, MAX_PAGE = 20, 100


def build_routes(context: GatewayContext) -> list[BaseRoute]:
    """Return the routes of `/v1/batches`."""
    batch = "/v1/batches/{batch}"
    return [
        Route("/v1/batches", partial(_create, context), methods=["POST"]),
        Route("/v1/batches", partial(_list, context), methods=["GET"]),
        Route(batch, partial(_show, context), methods=["GET"]),
        Route(f"{batch}/cancel", partial(_change, context, cancelled_batch), methods=["POST"]),
        Route(f"{batch}/pause", partial(_change, context, _paused), methods=["POST"]),
        Route(f"{batch}/resume", partial(_change, context, _resumed), methods=["POST"]),
    ]


async def _create(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    context.check_not_draining()
    data = await read_body_in_time(request, context.settings.max_body_bytes)
    body, tenant = parse(CreateBatch, decode(data)), principal.tenant.name
    key = principal.key.model_dump_json()
    batch = await create_batch(context, tenant, key, body, token_hex(12))
    return render_json(batch_bodies.batch_object(batch, context.broker.clock.now()))


async def create_batch(
    context: GatewayContext, tenant: str, key: str, body: CreateBatch, batch_id: str
) -> Batch:
    """Store the record of a new batch and return it; `key` is the API key, empty without one.

    Raises `BadRequest` or `NotFound` for a file that cannot be its input, and as
    `BatchStore.create` does.
    """
    file = await find_ready(context, tenant, body.input_file_id)
    if file.purpose != file_bodies.BATCH:
        raise BadRequest(
            f"the file {body.input_file_id!r} has the purpose {file.purpose!r}, not 'batch'",
            "input_file_id",
        )
    now = int(context.broker.clock.now())
    window = batch_bodies.window_seconds(body.completion_window)
    begin = max(now, body.not_before or 0)
    batch = Batch(
        tenant=tenant,
        id=batch_id,
        endpoint=body.endpoint,
        input_file=file.id,
        window_seconds=window,
        created_at=now,
        expires_at=begin + window,
        secret=token_bytes(32),
        key=key,
        metadata=body.metadata,
        output_expires_after_seconds=(
            body.output_expires_after.seconds if body.output_expires_after else MAX_EXPIRY_SECONDS
        ),
        not_before=body.not_before or 0,
    )
    stored = await context.batches.create(batch)
    log.info("batch_created", tenant=batch.tenant, batch=batch.id, bytes=file.size)
    return stored


async def _list(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    query = request.query_params
    batches = (await context.batches.list_of(principal.tenant.name))[::-1]
    page, has_more = cut_page(batches, batch_bodies.batch_id, query, DEFAULT_PAGE, MAX_PAGE)
    now = context.broker.clock.now()
    data = [batch_bodies.batch_object(batch, now) for batch in page]
    return render_json(page_body(data, has_more=has_more))


async def find_batch(context: GatewayContext, tenant: str, told: str) -> Batch:
    """Return a tenant's batch by the id that a client has told; raises `NotFound` without one."""
    found = await context.batches.find(tenant, batch_bodies.parse_batch_id(told))
    if found is None:
        raise batch_bodies.batch_not_found(told)
    return found


async def _show(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    batch = await find_batch(context, principal.tenant.name, request.path_params["batch"])
    return render_json(batch_bodies.batch_object(batch, context.broker.clock.now()))


async def _change(
    context: GatewayContext, change: Callable[[Batch, int], Batch], request: Request
) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    tenant, told = principal.tenant.name, request.path_params["batch"]
    changed = await change_batch(context, tenant, told, change)
    return render_json(batch_bodies.batch_object(changed, context.broker.clock.now()))


async def change_batch(
    context: GatewayContext, tenant: str, told: str, change: Callable[[Batch, int], Batch]
) -> Batch:
    """Store what `change` makes of a tenant's batch at a time in epoch seconds, and return it.

    Raises `NotFound`, what `change` raises, and as `BatchStore.change` does.
    """
    batch, now = await find_batch(context, tenant, told), int(context.broker.clock.now())
    changed = await context.batches.change(batch, lambda it: change(it, now))
    if changed is None:
        raise batch_bodies.batch_not_found(told)
    log.info("batch_changed", tenant=batch.tenant, batch=batch.id, status=changed.status.value)
    return changed


def cancelled_batch(batch: Batch, now: int) -> Batch:
    """Return a batch as one that is being cancelled; raises `BadRequest` if it has ended.

    A batch whose files are being written is over already: it ends as it would have.
    """
    _check_unfinished(batch)
    if batch.status in (BatchStatus.CANCELLING, BatchStatus.FINALIZING):
        return batch
    return batch.at_status(BatchStatus.CANCELLING, now)


def _paused(batch: Batch, now: int) -> Batch:
    _check_unfinished(batch)
    return replace(batch, paused=True)


def _resumed(batch: Batch, now: int) -> Batch:
    _check_unfinished(batch)
    return replace(batch, paused=False)


def _check_unfinished(batch: Batch) -> None:
    if batch.status.is_final:
        raise BadRequest(f"the batch has ended: its status is {batch.status.value!r}", "batch_id")
