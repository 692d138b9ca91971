"""The commands `millstream prices set` and `millstream prices list`."""

import asyncio
import json
from datetime import UTC, datetime

from millstream.admin.admin_client import JsonBody, admin_client, list_all
from millstream.admin.console_output import make_console, print_json_lines
from millstream.admin.fitted_table import Column, FittedTable
from millstream.prices.settings import PriceListSettings, PriceSettings

_COLUMNS = (
    Column("version", is_number=True),
    Column("model", "name", least=12),
    Column("currency"),
    Column("prompt", is_number=True),
    Column("cached", is_number=True),
    Column("completion", is_number=True),
    Column("since", "text"),
)
_SHOWN = ("version", "model", "currency", "prompt", "cached", "completion", "since")


async def set_price(settings: PriceSettings, stop: asyncio.Event) -> None:
    """Enter a model's price into the price book, and print the entry.

    Requests that are accepted from now on cost it; earlier ones keep theirs. Raises as
    `AdminClient.call`: also if no model has this name, or if cached tokens would cost more than
    others.
    """
    async with admin_client(settings) as admin:
        entry = await admin.call(
            "prices.set",
            name=settings.model,
            prompt=str(settings.prompt),
            completion=str(settings.completion),
            cached=None if settings.cached is None else str(settings.cached),
            currency=settings.currency,
        )
    row = _describe(entry)
    if settings.as_json:
        print(json.dumps(row))
    else:
        print(
            f"{row['model']}: {row['prompt']} {row['currency']} for a million prompt tokens, "
            f"{row['completion']} for generated ones (price-book version {row['version']})"
        )


async def list_prices(settings: PriceListSettings, stop: asyncio.Event) -> None:
    """Print the prices that hold, or with `settings.all` every one that ever did, by version.

    Raises as `AdminClient.call`.
    """
    async with admin_client(settings) as admin:
        entries = await list_all(
            admin, "prices.list", by="version", after=settings.after, all=settings.all
        )
    rows = [_describe(entry) for entry in entries[: settings.limit]]
    if settings.as_json:
        print_json_lines(rows)
    else:
        cells = [[str(row[name]) for name in _SHOWN] for row in rows]
        make_console().print(FittedTable(_COLUMNS, cells))


def _describe(entry: JsonBody) -> JsonBody:
    """Return an entry as it is printed, with the price of cached tokens also where it has none.

    Prices are of a million tokens, as text; `current` is True if it is what its model costs now.
    """
    since = datetime.fromtimestamp(entry["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    cached = entry["prompt"] if entry["cached"] is None else entry["cached"]
    shown = {**entry, "cached": cached, "since": since}
    return {name: shown[name] for name in (*_SHOWN, "current")}
