"""The commands `millstream keys …`, and `admin bootstrap`."""

import asyncio
from datetime import UTC, datetime

from rich import print_json

from millstream.admin.admin_client import JsonBody, admin_client, list_all
from millstream.admin.console_output import make_console, print_json_lines
from millstream.admin.fitted_table import Column, FittedTable
from millstream.keys.settings import (
    BootstrapSettings,
    ChangeKeySettings,
    CreateKeySettings,
    ListKeysSettings,
    RevokeKeySettings,
    RotateKeySettings,
)

_COLUMNS = (
    Column("id"),
    Column("tenant", "name", least=8),
    Column("name", "name", least=8),
    Column("scopes", "text", least=12),
    Column("expires"),
    Column("last used"),
    Column("state"),
)
_SHOWN = ("id", "key", "tenant", "name", "scopes", "expires_at", "rotated_from")


async def create(settings: CreateKeySettings, stop: asyncio.Event) -> None:
    """Create a key and print it, this once; raises as `AdminClient.call`."""
    async with admin_client(settings) as admin:
        made = await admin.call(
            "keys.create",
            tenant=settings.tenant,
            name=settings.name,
            scopes=list(settings.scope),
            force=settings.force,
            **settings.limits,
        )
    _print_key(made, settings.as_json)


async def change(settings: ChangeKeySettings, stop: asyncio.Event) -> None:
    """Change the limits that were given of a key; raises as `AdminClient.call`."""
    async with admin_client(settings) as admin:
        answer = await admin.call(
            "keys.change", id=settings.id, force=settings.force, **settings.limits
        )
    if settings.as_json:
        print_json(data=answer)
    else:
        make_console().print(f"{settings.id}: changed")


async def bootstrap(settings: BootstrapSettings, stop: asyncio.Event) -> None:
    """Create the first key with the scope `admin` and print it, this once.

    Raises as `AdminClient.call`: also if one works already, unless `settings.force`.
    """
    async with admin_client(settings) as admin:
        made = await admin.call("keys.bootstrap", force=settings.force)
    _print_key(made, settings.as_json)


async def rotate(settings: RotateKeySettings, stop: asyncio.Event) -> None:
    """Replace a key and print the new one, this once; raises as `AdminClient.call`."""
    async with admin_client(settings) as admin:
        made = await admin.call("keys.rotate", id=settings.id, overlap_seconds=settings.overlap)
    _print_key(made, settings.as_json)


async def revoke(settings: RevokeKeySettings, stop: asyncio.Event) -> None:
    """Revoke a key; open sockets and streams are cut. Raises as `AdminClient.call`."""
    async with admin_client(settings) as admin:
        answer = await admin.call("keys.revoke", id=settings.id)
    if settings.as_json:
        print_json(data=answer)
    else:
        make_console().print(f"{settings.id}: revoked")


async def list_keys(settings: ListKeysSettings, stop: asyncio.Event) -> None:
    """Print every managed key, as a table or as JSON with an object in each line.

    Raises as `AdminClient.call`.
    """
    async with admin_client(settings) as admin:
        keys = await list_all(admin, "keys.list", by="id")
    if settings.as_json:
        print_json_lines(keys)
    else:
        make_console().print(FittedTable(_COLUMNS, [_row(key) for key in keys]))


def _print_key(made: JsonBody, as_json: bool) -> None:
    if as_json:
        print_json(data={name: made[name] for name in _SHOWN})
        return
    console = make_console()
    console.print(made["key"])
    console.print(f"{made['id']}: of tenant {made['tenant']}; it is not shown again")


def _row(key: JsonBody) -> tuple[str, ...]:
    return (
        key["id"],
        key["tenant"],
        key["name"],
        ", ".join(key["scopes"]),
        _describe_time(key["expires_at"]),
        _describe_time(key["last_used_at"]),
        "revoked" if key["revoked_at"] else "disabled" if key["is_disabled"] else "",
    )


def _describe_time(at: float | None) -> str:
    """Return a time of UTC to the minute; empty for none."""
    return "" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"
