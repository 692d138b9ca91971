"""`GET /v1/usage`: a tenant asks what it has used, by day, model or key."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.context import GatewayContext
from gateway.entrypoints.endpoint import request_key
from gateway.entrypoints.plain_responses import render_json
from streams.errors import BadRequest
from streams.records.usage_sums import add_up, list_days, recent_days

_GROUPS = ("day", "model", "key")
PARAMETERS = {
    "by": "`day` (the default), `model` or `key`",
    "start": "first day of UTC, such as 2026-11-01; 30 days ago unless given",
    "end": "last day of UTC; today unless given",
}


async def show_usage(context: GatewayContext, request: Request) -> Response:
    """Answer with what the key's tenant has used; all requests that have ended are in it.

    Raises as `authenticate`, `BadRequest` for a wrong parameter, and `BrokerUnavailable`.
    """
    principal = await context.authenticate(request_key(request), request.scope, "usage:read")
    query = request.query_params
    if unknown := set(query) - PARAMETERS.keys():
        name = min(unknown)
        raise BadRequest(f"{name!r} is none of: {', '.join(PARAMETERS)}", name)
    by = query.get("by", "day")
    if by not in _GROUPS:
        raise BadRequest(f"by is {by!r}, not one of: {', '.join(_GROUPS)}", "by")
    start, end = recent_days(context.broker.clock.now())
    start, end = query.get("start", start), query.get("end", end)
    try:
        days = list_days(start, end)
    except ValueError as error:
        raise BadRequest(str(error), "start") from None
    await context.rollups.roll_up()
    rows = add_up(await context.rollups.read(principal.tenant.name, days), by)
    body = {"object": "list", "start": start, "end": end, "data": rows}
    return render_json(body)
