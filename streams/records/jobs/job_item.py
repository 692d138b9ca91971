"""One request that runs a line of a job, as its worker and its dispatcher end it."""

from collections.abc import Iterable, Mapping
from typing import Any

from streams import messages
from streams.broker.broker_client import Broker
from streams.headers import Envelope, ItemRef
from streams.records.jobs.item_results import ItemResult, build_result
from streams.records.jobs.result_store import read_result, store_result
from streams.records.log_contents import RequestEnd


class JobItem:
    """The line `ref` of a job, which a request with this envelope runs."""

    def __init__(self, broker: Broker, envelope: Envelope, ref: ItemRef) -> None:
        self._broker, self._envelope, self._ref = broker, envelope, ref

    async def is_settled(self) -> bool:
        """Return whether the line has its result. Raises `BrokerUnavailable`."""
        return await self._read() is not None

    async def read_end(self) -> RequestEnd | None:
        """Return how the line ended, by its result; None while it has no result.

        Raises `BrokerUnavailable`.
        """
        result = await self._read()
        return result.to_end() if result else None

    async def _read(self) -> ItemResult | None:
        ref = self._ref
        return await read_result(self._broker, self._envelope.tenant, ref.job, ref.index)

    async def store_result(
        self, packed: Iterable[bytes], terminal: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Store how the line ends, given its token log's packed records. Idempotent.

        Returns the terminal that counts: that of the line's result, if it has one already. Raises
        `BrokerUnavailable`, or `StoreRefused` if there is no room.
        """
        result = build_result(
            self._envelope.request_id,
            self._ref.attempt,
            self._broker.clock.now_ms(),
            [messages.unpack_record(each) for each in packed],
            terminal,
        )
        is_first = await store_result(self._broker, self._envelope.tenant, self._ref, result)
        end = None if is_first else await self.read_end()
        return end.terminal if end else terminal
