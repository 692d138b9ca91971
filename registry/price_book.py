"""Price book: numbered prices of models, which never change, in the KV bucket `prices`.

A new price is a new entry; a request is billed by the entry that was its model's when it was
accepted, so a change of prices never bills the past anew. Any service looks prices up without
waiting; the admin service alone writes them, by `PriceBook.set_price`.
"""

from collections.abc import Sequence
from functools import partial

from registry.kv_records import KvRecords
from registry.kv_view import Declares, never
from registry.models import Model
from registry.price_records import PriceRecord
from streams.broker.broker_client import Broker
from streams.errors import MillstreamError
from streams.usage_accounts import NO_CURRENCY, Price, PriceEntry

BUCKET = "prices"
_ENTRY = "entry."


class PriceRefused(MillstreamError):
    """A price cannot be entered: a cached token would cost more than another one of the prompt."""

    code = "invalid_request"


class _VersionTaken(Exception):
    """Another writer has entered a price under this version."""


class PriceBook(KvRecords[PriceRecord]):
    """All prices that ever held, kept current and looked up without waiting."""

    bucket = BUCKET

    def __init__(self, broker: Broker, declares: Declares = never, replicas: int = 1) -> None:
        self._broker = broker
        super().__init__(broker, declares, replicas)
        self._current: dict[str, PriceRecord] = {}
        self._view.on_change(self._index)

    @property
    def records(self) -> Sequence[PriceRecord]:
        """All entries, in order of their versions."""
        return sorted(self._view.values.values(), key=lambda record: record.version)

    @property
    def currency(self) -> str:
        """The currency of the newest entry; `XXX`, which stands for none, in an empty book."""
        return next((each.currency for each in reversed(self.records)), NO_CURRENCY)

    def current(self, model: str) -> PriceRecord | None:
        """Return the entry that holds for a model now; None if it has none."""
        return self._current.get(model)

    def entry_for(self, model: Model) -> PriceEntry:
        """Return the price of a request for `model` that is accepted now.

        A model without an entry costs what its own record says, under version 0.
        """
        record = self._current.get(model.name)
        return record.entry if record else PriceEntry(price=model.price)

    async def set_price(self, model: str, currency: str, price: Price) -> PriceRecord:
        """Enter a model's new price, and return its entry; requests accepted from now on cost it.

        If it is the model's price already, nothing is entered. Safe against concurrent writers.
        Raises `PriceRefused` if a cached token would cost more than another one of the prompt,
        pydantic's ValidationError for a currency that is no code of ISO 4217, and
        `BrokerUnavailable` or `StoreRefused` if the broker does not store it.
        """
        if (price.cached or 0) > price.prompt:
            raise PriceRefused(
                f"a cached prompt token must not cost more than another one: {price.cached} is "
                f"above {price.prompt}, in 10^-12 {currency}"
            )
        while True:
            now = self._current.get(model)
            if now and now.entry == PriceEntry(now.version, currency, price):
                return now
            record = PriceRecord(
                version=1 + max((each.version for each in self._view.values.values()), default=0),
                model=model,
                currency=currency,
                prompt=price.prompt,
                completion=price.completion,
                cached=price.cached,
                created=int(self._broker.clock.now()),
            )
            try:
                await self._view.write(f"{_ENTRY}{record.version}", partial(_create, record))
            except _VersionTaken:
                continue
            return record

    def _index(self) -> None:
        self._current = {record.model: record for record in self.records}

    @staticmethod
    def _decode(key: str, value: bytes) -> PriceRecord:
        if not key.startswith(_ENTRY):
            raise ValueError("no entry of the price book")
        return PriceRecord.model_validate_json(value)


def _create(record: PriceRecord, known: PriceRecord | None) -> bytes:
    """Encode a new entry; raises `_VersionTaken` where there is one of another writer."""
    if known is not None and known != record:
        raise _VersionTaken
    return record.model_dump_json().encode()
