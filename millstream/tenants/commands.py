"""The commands `millstream tenants add`, `change`, `list` and `remove`."""

import asyncio
from pathlib import Path

from rich import print_json

from millstream.admin.admin_client import AdminClient, JsonBody, admin_client, list_all
from millstream.admin.console_output import make_console, print_json_lines
from millstream.admin.fitted_table import Column, FittedTable
from millstream.tenants.producer_files import ProducerConnection, check_directory, write_files
from millstream.tenants.settings import (
    AddTenantSettings,
    ChangeTenantSettings,
    ListTenantsSettings,
    RemoveTenantSettings,
    TenantFlags,
)
from streams.base_settings import TenantLimits
from streams.server_urls import parse_server_urls
from streams.subjects import escape

_COLUMNS = (
    Column("tenant", "name", least=12),
    Column("weight", is_number=True),
    Column("keys", is_number=True),
    Column("publishes"),
    Column("from"),
    Column("limits", "text", least=12),
)
_SOURCES = {"config": "configuration", "api_key": "--api-key", "api": "operator"}
_UNKNOWN_MODEL = "MODEL"  # in examples for a cell that has no model yet
_OWN_COLUMNS = {"weight", "publishes", "soft_quotas"}


async def add(settings: AddTenantSettings, stop: asyncio.Event) -> None:
    """Add a tenant, without keys, and print its name; with `producer` issue NATS credentials.

    Raises as `AdminClient.call`, and `ProducerFilesNotWritten`.
    """
    given = _given_limits(settings)
    if settings.producer:
        check_directory(settings.producer)
        given["publishes"] = True
    async with admin_client(settings) as admin:
        answer = await admin.call("tenants.add", name=settings.name, **given)
        lines = [f"{settings.name}: added"]
        if settings.producer:
            answer["producer"] = await _issue_credentials(admin, settings, settings.producer)
            lines += answer["producer"]["files"]
    _print_outcome(answer, settings.as_json, "\n".join(lines))


async def change(settings: ChangeTenantSettings, stop: asyncio.Event) -> None:
    """Change the limits that were given of a tenant, and issue or withdraw NATS credentials.

    Raises as `add`.
    """
    given, name = _given_limits(settings), settings.name
    if settings.producer:
        check_directory(settings.producer)
    async with admin_client(settings) as admin:
        answer, lines = await admin.call("tenants.show", name=name), []
        if settings.producer and not answer["publishes"]:
            given["publishes"] = True
        if given:
            answer = await admin.call("tenants.change", name=name, **given)
            lines = [f"{name}: changed"]
        if settings.producer:
            answer["producer"] = await _issue_credentials(
                admin, settings, settings.producer, settings.overlap
            )
            lines += answer["producer"]["files"]
        if settings.withdraw:
            answer["producer"] = await admin.call("credentials.withdraw", name=name)
            lines.append(f"{name}: its NATS users are cut off")
    _print_outcome(answer, settings.as_json, "\n".join(lines))


def _given_limits(settings: TenantFlags) -> JsonBody:
    limits = set(TenantLimits.model_fields)
    return settings.model_dump(mode="json", include=limits, exclude_unset=True)


async def _issue_credentials(
    admin: AdminClient, settings: TenantFlags, producer: Path, overlap: float | None = None
) -> JsonBody:
    """Write new credentials of a tenant into a directory, with examples for the first model.

    Returns what was issued, without the secret, and the files.
    """
    models = (await admin.call("models.list", limit=1))["data"]
    answer = await admin.call(
        "credentials.issue",
        name=settings.name,
        expires_seconds=settings.expires,
        overlap_seconds=overlap,
    )
    connection = ProducerConnection(
        url=parse_server_urls(settings.nats).text,
        ca=str(settings.nats_ca.expanduser().resolve()) if settings.nats_ca else "",
        tenant=settings.name,
        model=escape(models[0]["name"] if models else _UNKNOWN_MODEL),
    )
    written = write_files(check_directory(producer), connection, answer.pop("credentials"))
    return {**answer, "files": [str(path) for path in written]}


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
