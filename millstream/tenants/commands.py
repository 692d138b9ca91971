"""The commands `millstream tenants add`, `change`, `list` and `remove`."""

import asyncio

from rich import print_json

from millstream.admin.admin_client import JsonBody, admin_client, list_all
from millstream.admin.console_output import make_console, print_json_lines
from millstream.admin.fitted_table import Column, FittedTable
from millstream.tenants.settings import ListTenantsSettings, RemoveTenantSettings, TenantFlags
from streams.base_settings import TenantLimits

_COLUMNS = (
    Column("tenant", "name", least=12),
    Column("weight", is_number=True),
    Column("keys", is_number=True),
    Column("publishes"),
    Column("from"),
    Column("limits", "text", least=12),
)
_SOURCES = {"config": "configuration", "api_key": "--api-key", "api": "operator"}
_OWN_COLUMNS = {"weight", "publishes", "soft_quotas"}


async def add(settings: TenantFlags, stop: asyncio.Event) -> None:
    """Add a tenant, without keys, and print its name; raises as `AdminClient.call`."""
    await _send("tenants.add", settings, "added")


async def change(settings: TenantFlags, stop: asyncio.Event) -> None:
    """Change the limits that were given of a tenant; raises as `AdminClient.call`."""
    await _send("tenants.change", settings, "changed")


async def _send(operation: str, settings: TenantFlags, done: str) -> None:
    given = settings.model_dump(
        mode="json", include=set(TenantLimits.model_fields), exclude_unset=True
    )
    async with admin_client(settings) as admin:
        tenant = await admin.call(operation, name=settings.name, **given)
    _print_outcome(tenant, settings.as_json, f"{settings.name}: {done}")


async def remove(settings: RemoveTenantSettings, stop: asyncio.Event) -> None:
    """Remove a tenant with its keys; raises as `AdminClient.call`."""
    async with admin_client(settings) as admin:
        answer = await admin.call("tenants.remove", name=settings.name)
    _print_outcome(answer, settings.as_json, f"{settings.name}: removed")


async def list_tenants(settings: ListTenantsSettings, stop: asyncio.Event) -> None:
    """Print every tenant with its limits, as a table or as JSON with an object in each line.

    Raises as `AdminClient.call`.
    """
    async with admin_client(settings) as admin:
        tenants = await list_all(admin, "tenants.list")
    if settings.as_json:
        print_json_lines(tenants)
    else:
        make_console().print(FittedTable(_COLUMNS, [_row(tenant) for tenant in tenants]))


def _row(tenant: JsonBody) -> tuple[str, ...]:
    return (
        tenant["name"],
        f"{tenant['weight']:g}",
        str(tenant["keys"]),
        "yes" if tenant["publishes"] else "",
        _SOURCES[tenant["source"]],
        _describe_limits(tenant),
    )


def _describe_limits(tenant: JsonBody) -> str:
    """The limits that are not those of a tenant of which nothing is told."""
    fields = TenantLimits.model_fields.items()
    told = [
        f"{name}={tenant[name]:g}"
        for name, field in fields
        if name not in _OWN_COLUMNS and tenant[name] != field.default
    ]
    return ", ".join([*told, *(f"{name} soft" for name in tenant["soft_quotas"])])


def _print_outcome(answer: JsonBody, as_json: bool, sentence: str) -> None:
    if as_json:
        print_json(data=answer)
    else:
        make_console().print(sentence)
