"""`/v1/batches/estimate`, ours: what a batch may take, before it is created."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api.authentication.authenticator import Principal
from api.batches.batch_line import BatchLine, parse_body, to_submission
from api.batches.estimate_body import estimate_object
from api.batches.input_estimate import InputEstimate, count_prompt_tokens
from api.schemas.batches import EstimateBatch
from api.schemas.parsing import decode, parse
from gateway.context import GatewayContext
from gateway.entrypoints.batches.batch_creation import estimate_input, find_input
from gateway.entrypoints.endpoint import read_body_in_time, request_key
from gateway.entrypoints.plain_responses import render_json
from streams.records.jobs.batch_records import Batch, BatchStatus
from streams.records.jobs.result_space import read_result_space


def build_routes(context: GatewayContext) -> list[BaseRoute]:
    """Return the route of estimates."""
    return [Route("/v1/batches/estimate", partial(_estimate, context), methods=["POST"])]


async def _estimate(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    data = await read_body_in_time(request, context.settings.max_body_bytes)
    body = parse(EstimateBatch, decode(data))
    file = await find_input(context, principal.tenant.name, body.input_file_id)
    estimate = await estimate_input(context, principal.tenant, file, body.endpoint)

    async def count(line: BatchLine) -> int:
        submission = to_submission(line, parse_body(line))
        validated = await context.validator.validate(principal.tenant, submission)
        return validated[0].packed.prompt_tokens

    prompt_tokens, sampled = await count_prompt_tokens(estimate, count)
    space = await read_result_space(context.broker, context.batches)
    like = await _find_like(context, principal, body.endpoint, estimate)
    currency = context.prices.currency
    shown = estimate_object(estimate, prompt_tokens, sampled, like, currency, space.free)
    return render_json(shown)


async def _find_like(
    context: GatewayContext, principal: Principal, endpoint: str, estimate: InputEstimate
) -> Batch | None:
    """The tenant's newest batch of the same endpoint and one model that has completed."""
    if len(estimate.models) != 1:
        return None
    (model,) = estimate.models
    for batch in reversed(await context.batches.list_of(principal.tenant.name)):
        is_like = (batch.endpoint, batch.model) == (endpoint, model)
        if is_like and batch.status is BatchStatus.COMPLETED and batch.completed:
            return batch
    return None
