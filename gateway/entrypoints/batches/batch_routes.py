"""`/v1/batches`: create, show, list and cancel batches, as the OpenAI SDK does.

Pausing and resuming are ours.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from secrets import token_hex

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api import batch_bodies, file_bodies
from api.authentication.authenticator import Principal
from api.openai_bodies import page_body
from api.schemas.batches import CreateBatch
from api.schemas.parsing import decode, parse
from gateway.context import GatewayContext
from gateway.entrypoints.batches.batch_creation import create_batch, find_input
from gateway.entrypoints.batches.openapi_paths import DEFAULT_PAGE, MAX_PAGE
from gateway.entrypoints.choice_fanout import parse_idempotency_key
from gateway.entrypoints.endpoint import read_body_in_time, request_key
from gateway.entrypoints.plain_responses import cut_page, render_json
from streams.errors import BadRequest, IdempotencyConflict
from streams.records.cas.cas_records import RecordChanged
from streams.records.jobs.batch_records import Batch, BatchStatus

log = structlog.get_logger()

BATCH_ID_DIGITS = 24


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
    body, key = parse(CreateBatch, decode(data)), parse_idempotency_key(request)
    name = token_hex(BATCH_ID_DIGITS // 2) if key is None else _name_of(key)
    batch = await context.batches.find(principal.tenant.name, name) if key else None
    if batch is None:
        batch = await _create_once(context, principal, name, body)
    if (batch.input_file, batch.endpoint) != (
        file_bodies.parse_file_id(body.input_file_id),
        body.endpoint,
    ):
        raise IdempotencyConflict(
            f"under this Idempotency-Key the batch {batch_bodies.batch_id(batch)!r} was created, "
            "of another file or for another endpoint"
        )
    return render_json(batch_bodies.batch_object(batch, context.broker.clock.now()))


async def _create_once(
    context: GatewayContext, principal: Principal, name: str, body: CreateBatch
) -> Batch:
    """Create a batch, or return that of this name which somebody else has just created."""
    tenant, key = principal.tenant, principal.key.model_dump_json()
    file = await find_input(context, tenant.name, body.input_file_id)
    try:
        return await create_batch(context, tenant, key, name, file, body.endpoint, body)
    except RecordChanged:
        return await find_batch(context, tenant.name, batch_bodies.batch_id_of(name))


def _name_of(idempotency_key: str) -> str:
    """Return the id of the batch for which a tenant's idempotency key stands."""
    return sha256(idempotency_key.encode()).hexdigest()[:BATCH_ID_DIGITS]


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
