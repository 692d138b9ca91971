"""Copies of token logs: replies that were made for one route, for another one.

A copy has a name of its own, `copy-<request id>`, so that whoever looks for the request's log finds
the log alone.
"""

from collections.abc import Sequence

from streams.broker.broker_client import Broker
from streams.messages import Encoding, Record
from streams.records.token_log import Fenced, TokenLog
from streams.subjects import LogAddress

_PREFIX = "copy-"


class LogCopy:
    """The copy of a request's token log for the route and in the encoding of another submission."""

    def __init__(
        self, broker: Broker, request: LogAddress, route: str, encoding: Encoding, shards: int
    ) -> None:
        address = LogAddress(request.tenant, route, f"{_PREFIX}{request.request_id}")
        self._log = TokenLog(broker, address, shards, encoding=encoding)

    async def extend(self, records: Sequence[Record]) -> None:
        """Append what the copy lacks of these records, which are all that the log has.

        Idempotent, and safe to run concurrently. Raises `BrokerUnavailable`.
        """
        have = (await self._log.read()).records
        try:
            for record in records[_common(have, records) :]:
                await self._log.append(record)
        except Fenced:
            pass  # another gateway copies

    @staticmethod
    async def read(broker: Broker, address: LogAddress, shards: int) -> Sequence[Record]:
        """Return the records of the log at an address. Raises `BrokerUnavailable`."""
        return (await TokenLog(broker, address, shards).read()).records


def _common(have: Sequence[Record], records: Sequence[Record]) -> int:
    """Return how many of the records are at the end of those that the copy has.

    Mostly these are all that it has. Not so if the log has lost its begin and begun anew.
    """
    return next(
        n
        for n in range(min(len(have), len(records)), -1, -1)
        if have[len(have) - n :] == records[:n]
    )
