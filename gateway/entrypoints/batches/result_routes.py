"""Results of a batch so far: all that there are, and one line by its `custom_id`.

Both are ours; OpenAI has files alone, and those when the batch has ended.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api.authentication.authenticator import Principal
from api.batches.batch_line import InputLine
from api.batches.line_index import find_place
from api.batches.result_lines import render_line, render_lines
from gateway.context import GatewayContext
from gateway.entrypoints.batches.batch_routes import find_batch
from gateway.entrypoints.endpoint import request_key
from gateway.entrypoints.files.transfers import transfer
from gateway.entrypoints.plain_responses import render_json, respond_in_pieces
from streams.errors import NotFound
from streams.records.files.file_records import StoredFile
from streams.records.jobs.batch_records import Batch


def build_routes(context: GatewayContext) -> list[BaseRoute]:
    """Return the routes of the results and items of `/v1/batches/{id}`."""
    batch = "/v1/batches/{batch}"
    return [
        Route(f"{batch}/results", partial(_results, context), methods=["GET"]),
        Route(f"{batch}/items/{{item:path}}", partial(_item, context), methods=["GET"]),
    ]


async def _results(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    batch = await find_batch(context, principal.tenant.name, request.path_params["batch"])
    source = await _find_input(context, batch)
    pieces = _iterate_results(context, principal, batch, source)
    return await respond_in_pieces(pieces, "application/jsonl")


async def _find_input(context: GatewayContext, batch: Batch) -> StoredFile:
    found = await context.files.find(batch.tenant, batch.input_file)
    if found is None:
        raise NotFound("the input file of this batch was deleted, or its time is over")
    return found


async def _iterate_results(
    context: GatewayContext, principal: Principal, batch: Batch, source: StoredFile
) -> AsyncIterator[bytes]:
    with transfer(context, principal) as check:
        is_over = batch.status.is_final and bool(batch.index_file)
        lines = render_lines(context.broker, context.registry, batch, source, is_over=is_over)
        async for line in lines:
            check()
            yield line.data


async def _item(context: GatewayContext, request: Request) -> Response:
    """Answer with one line: whether it has ended, and its line of the output if so."""
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    batch = await find_batch(context, principal.tenant.name, request.path_params["batch"])
    custom_id = request.path_params["item"]
    with transfer(context, principal):
        line = await _find_line(context, batch, custom_id)
    rendered = await render_line(context.broker, context.registry, batch, line)
    status = "pending" if rendered is None else "failed" if rendered.is_error else "completed"
    return render_json(
        {
            "object": "batch.item",
            "batch_id": request.path_params["batch"],
            "custom_id": custom_id,
            "index": line.index,
            "status": status,
            "result": orjson.loads(rendered.data) if rendered else None,
        }
    )


async def _find_line(context: GatewayContext, batch: Batch, custom_id: str) -> InputLine:
    """Return the line with an id; raises `NotFound` if none has it, or none can be found yet."""
    source, index = await asyncio.gather(
        _find_input(context, batch), context.files.find(batch.tenant, batch.index_file)
    )
    if index is None:
        status = batch.status.value
        raise NotFound(f"the lines of this batch cannot be found by custom_id: it is {status!r}")
    place = await find_place(context.line_files, index, custom_id)
    if place is None:
        raise NotFound(f"no line of this batch has the custom_id {custom_id!r}")
    read = context.line_files.read(source, place.offset, place.end)
    pieces = [piece async for piece in read]
    return InputLine(place.index, place.offset, place.end, b"".join(pieces))
