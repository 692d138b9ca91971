"""Room for durable answers: no request is accepted whose answer might push out another one.

A stream of answers that is full drops its oldest. Requests are accepted up to three quarters, so
the rest is for the answers of those accepted before.
"""

import time
from typing import NamedTuple

from streams import topology
from streams.broker.broker_client import Broker
from streams.errors import StorageFull

CHECK_SECONDS = 1.0
FULL_RATIO = 0.75
_RETRY_SECONDS = 5.0


class _Room(NamedTuple):
    checked_at: float  # monotonic seconds
    stored_bytes: int
    max_bytes: int


class AnswerSpace:
    """Knows how full the tenants' streams of answers are, as of a second ago at most."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._rooms: dict[str, _Room] = {}

    async def check(self, tenant: str) -> None:
        """Raise `StorageFull` if the tenant has no room for further answers, or no stream.

        Raises `BrokerUnavailable`.
        """
        stream, room = topology.answers_stream_name(tenant), self._rooms.get(tenant)
        if room is None or time.monotonic() - room.checked_at > CHECK_SECONDS:
            state = await self._broker.read_tenant_stream(stream, "")
            if state is None:
                raise StorageFull(f"there is no stream {stream} yet", _RETRY_SECONDS)
            room = _Room(time.monotonic(), state["bytes"], state["max_bytes"])
            self._rooms[tenant] = room
        if room.stored_bytes >= FULL_RATIO * room.max_bytes:
            raise StorageFull(
                f"the durable answers in {stream} have {room.stored_bytes} bytes, and it takes "
                f"requests up to {FULL_RATIO:.0%} of {room.max_bytes}: purge those that were read",
                _RETRY_SECONDS,
            )
