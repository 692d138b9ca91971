"""The commands `millstream prices set` and `millstream prices list`."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from millstream.admin.console_output import make_console
from millstream.admin.fitted_table import Column, FittedTable
from millstream.prices.settings import PriceListSettings, PriceSettings
from registry.price_book import PriceBook, PriceRecord
from registry.store import Registry
from streams.base_settings import ClientSettings
from streams.broker.broker_client import connect
from streams.errors import ModelNotFound
from streams.usage_accounts import PICO_PER_MILLION, Price

_COLUMNS = (
    Column("version", is_number=True),
    Column("model", "name", least=12),
    Column("currency"),
    Column("prompt", is_number=True),
    Column("cached", is_number=True),
    Column("completion", is_number=True),
    Column("since", "text"),
)


async def set_price(settings: PriceSettings, stop: asyncio.Event) -> None:
    """Enter a model's price into the price book, and print the entry.

    Requests that are accepted from now on cost it; earlier ones keep theirs. Raises `ModelNotFound`
    if no model has this name, `PriceRefused` if cached tokens would cost more than others, and
    `BrokerUnavailable` if NATS does not answer.
    """
    async with open_price_book(settings) as (registry, prices):
        if settings.model not in registry.models:
            raise ModelNotFound(settings.model)
        price = Price(
            _to_picos(settings.prompt),
            _to_picos(settings.completion),
            None if settings.cached is None else _to_picos(settings.cached),
        )
        currency = settings.currency or prices.currency
        record = await prices.set_price(settings.model, currency, price)
    row = describe(record, is_current=True)
    if settings.as_json:
        print(json.dumps(row))
    else:
        print(
            f"{record.model}: {row['prompt']} {record.currency} for a million prompt tokens, "
            f"{row['completion']} for generated ones (price-book version {record.version})"
        )


async def list_prices(settings: PriceListSettings, stop: asyncio.Event) -> None:
    """Print the prices that hold, or with `settings.all` every one that ever did, by version.

    Raises `BrokerUnavailable` if NATS does not answer.
    """
    async with open_price_book(settings) as (_, prices):
        rows = [
            describe(record, is_current=prices.current(record.model) == record)
            for record in prices.records
            if record.version > settings.after
        ]
    shown = [row for row in rows if settings.all or row["current"]][: settings.limit]
    if settings.as_json:
        print("".join(json.dumps(row) + "\n" for row in shown), end="")
    else:
        cells = [[str(row[name]) for name in _SHOWN] for row in shown]
        make_console().print(FittedTable(_COLUMNS, cells))


_SHOWN = ("version", "model", "currency", "prompt", "cached", "completion", "since")


def describe(record: PriceRecord, *, is_current: bool) -> dict[str, Any]:
    """Return an entry of the price book as JSON has it; prices are of a million tokens, as text.

    `current` is True if it is what its model costs now.
    """
    cached = record.prompt if record.cached is None else record.cached
    return {
        "version": record.version,
        "model": record.model,
        "currency": record.currency,
        "prompt": _per_million(record.prompt),
        "cached": _per_million(cached),
        "completion": _per_million(record.completion),
        "since": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "current": is_current,
    }


def _to_picos(per_million: Decimal) -> int:
    return int(per_million * PICO_PER_MILLION)


def _per_million(picos: int) -> str:
    """A token's price as that of a million tokens, exactly and without an exponent."""
    return f"{(Decimal(picos) / PICO_PER_MILLION).normalize():f}"


@asynccontextmanager
async def open_price_book(settings: ClientSettings) -> AsyncIterator[tuple[Registry, PriceBook]]:
    """Connect to NATS and yield the registry of models and the price book, both loaded.

    Leaving the `with` block closes them and the connection. Raises `BrokerUnavailable` if NATS does
    not answer.
    """
    async with connect(settings.nats, "millstream-prices", settings.nats_files) as broker:
        registry = await Registry.open(broker)
        try:
            prices = await PriceBook.open(broker)
            try:
                yield registry, prices
            finally:
                await prices.close()
        finally:
            await registry.close()
