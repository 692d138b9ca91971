"""The commands `millstream webhooks list`, `create`, `test`, `deliveries`, `redeliver` …"""

import asyncio
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import get_args
from urllib.parse import quote, urlencode

from api.schemas.webhooks import EventName
from millstream.admin.console_output import make_console, make_whole_table, print_json_lines
from millstream.gateway_client import GatewayClient, JsonBody
from millstream.webhooks.settings import (
    CreateEndpointSettings,
    DeliveriesSettings,
    OneEndpointSettings,
    RedeliverSettings,
    RotateSecretSettings,
    TestEndpointSettings,
    WebhookCommandSettings,
)

_ENDPOINTS = "/v1/webhook_endpoints"
# `success` of a test says that something was answered, whatever it was
_NOT_SHOWN = ("object", "event", "attempts", "success")


async def list_endpoints(settings: WebhookCommandSettings, stop: asyncio.Event) -> None:
    """Print the endpoints, the newest first; raises as `GatewayClient` does."""
    found = await _call(settings, "GET", f"{_ENDPOINTS}?limit=100")
    _print_rows(found["data"], ("id", "status", "name", "url"), settings)


async def create(settings: CreateEndpointSettings, stop: asyncio.Event) -> None:
    """Create an endpoint, and print it with its secret, this once; raises as `GatewayClient`."""
    kinds = list(settings.event or get_args(EventName))
    body = {"name": settings.name, "url": settings.target, "event_types": kinds}
    _print_one(await _call(settings, "POST", _ENDPOINTS, body), settings)


async def test(settings: TestEndpointSettings, stop: asyncio.Event) -> int:
    """Post a sample event, and print the status that was answered.

    Returns 1 if that is none of success. Raises as `GatewayClient` does, also if nothing was
    answered.
    """
    body: JsonBody = {"event_type": settings.event}
    found = await _call(settings, "POST", f"{_path(settings.id)}/test", body)
    _print_one(found, settings)
    return 0 if 200 <= found["status_code"] < 300 else 1


async def deliveries(settings: DeliveriesSettings, stop: asyncio.Event) -> None:
    """Print what was sent to an endpoint, the newest first; raises as `GatewayClient` does."""
    query = urlencode(
        {"limit": settings.limit, **({"after": settings.after} if settings.after else {})}
    )
    found = await _call(settings, "GET", f"{_path(settings.id)}/deliveries?{query}")
    if settings.as_json:
        _print_rows(found["data"], (), settings)
        return
    rows = [{**each, "attempts": _describe_attempts(each)} for each in found["data"]]
    _print_rows(rows, ("id", "event_type", "status", "attempts"), settings)


def _describe_attempts(delivery: JsonBody) -> str:
    attempts = delivery["attempts"]
    if not attempts:
        return "none"
    last = attempts[-1]
    return f"{len(attempts)}, last: {last['status_code'] or last['error']}"


async def redeliver(settings: RedeliverSettings, stop: asyncio.Event) -> None:
    """Have an event sent again, with the same id; raises as `GatewayClient` does."""
    path = f"{_path(settings.id)}/deliveries/{quote(settings.delivery, safe='')}/redeliver"
    _print_one(await _call(settings, "POST", path), settings)


async def rotate(settings: RotateSecretSettings, stop: asyncio.Event) -> None:
    """Make a new secret, and print the endpoint with it; raises as `GatewayClient` does."""
    body: JsonBody = {"keep_old_secret_active_for_24_hours": settings.keep_old}
    _print_one(await _call(settings, "POST", f"{_path(settings.id)}/rotate_secret", body), settings)


async def enable(settings: OneEndpointSettings, stop: asyncio.Event) -> None:
    """Send events to an endpoint that was disabled again; raises as `GatewayClient` does."""
    _print_one(await _call(settings, "POST", _path(settings.id), {"enabled": True}), settings)


async def delete(settings: OneEndpointSettings, stop: asyncio.Event) -> None:
    """Delete an endpoint, to which nothing more is sent; raises as `GatewayClient` does."""
    _print_one(await _call(settings, "DELETE", _path(settings.id)), settings)


def _path(endpoint: str) -> str:
    return f"{_ENDPOINTS}/{quote(endpoint, safe='')}"


async def _call(
    settings: WebhookCommandSettings, method: str, path: str, body: JsonBody | None = None
) -> JsonBody:
    return await asyncio.to_thread(GatewayClient(settings).call, method, path, body)


def _print_one(found: JsonBody, settings: WebhookCommandSettings) -> None:
    if settings.as_json:
        print(json.dumps(found))
        return
    table = make_whole_table()
    for name, value in found.items():
        if name not in _NOT_SHOWN and value is not None:
            table.add_row(name, _show_time(value) if name.endswith("_at") else _show(value))
    make_console().print(table)


def _print_rows(
    rows: Iterable[JsonBody], columns: tuple[str, ...], settings: WebhookCommandSettings
) -> None:
    """One line of JSON for each, or a table of these columns."""
    if settings.as_json:
        print_json_lines(rows)
        return
    table = make_whole_table(*columns)
    for row in rows:
        table.add_row(*(_show(row[column]) for column in columns))
    make_console().print(table)


def _show_time(epoch_seconds: float) -> str:
    return f"{datetime.fromtimestamp(epoch_seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _show(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
