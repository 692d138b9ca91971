"""Handlers of the operations on the price book; they return JSON objects.

Prices are of a million tokens there and back, as text that keeps every decimal.
"""

from collections.abc import Mapping

from admin.operation_table import PriceArguments, PricePageArguments
from admin.operations import Handler, JsonBody, make_page
from registry.price_book import PriceBook
from registry.price_records import PriceRecord, per_million, to_picos
from registry.store import Registry
from streams.usage_accounts import Price


class PriceOperations:
    """The operations on prices; they raise `ModelNotFound` and the errors of `PriceBook`.

    A price is answered once it is stored; requests that are accepted from then on cost it.
    """

    def __init__(self, registry: Registry, prices: PriceBook) -> None:
        self._registry, self._prices = registry, prices

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The coroutine function of each operation in the table, by its name."""
        return {"prices.list": self._list_prices, "prices.set": self._set_price}

    async def _list_prices(self, page: PricePageArguments) -> JsonBody:
        wanted = {
            record.version: record
            for record in self._prices.records
            if (page.all or self._is_current(record)) and page.model in (None, record.model)
        }
        return make_page(
            wanted,
            lambda version: self._describe(wanted[version]),
            after=page.after,
            limit=page.limit,
        )

    async def _set_price(self, arguments: PriceArguments) -> JsonBody:
        if arguments.name not in self._registry.models:
            raise self._registry.not_found(arguments.name)
        price = Price(
            to_picos(arguments.prompt),
            to_picos(arguments.completion),
            None if arguments.cached is None else to_picos(arguments.cached),
        )
        currency = arguments.currency or self._prices.currency
        return self._describe(await self._prices.set_price(arguments.name, currency, price))

    def _is_current(self, record: PriceRecord) -> bool:
        return self._prices.current(record.model) == record

    def _describe(self, record: PriceRecord) -> JsonBody:
        """Return an entry with prices of a million tokens; `current`: its model costs it now."""
        return {
            "version": record.version,
            "model": record.model,
            "currency": record.currency,
            "prompt": per_million(record.prompt),
            "cached": None if record.cached is None else per_million(record.cached),
            "completion": per_million(record.completion),
            "created": record.created,
            "current": self._is_current(record),
        }
