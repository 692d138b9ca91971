"""The KV bucket of leases and members (ADR-8): in memory, values live for one lease."""

from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from streams import declaration
from streams.connection import Broker
from streams.topology import Scale

NAME = "leases"
STREAM = f"KV_{NAME}"
RENEWALS = 5  # of a value, in one lease
DELETED = {"KV-Operation": "DEL"}


class Bucket:
    """Declared once; again after `doubt`, since a broker that restarts has forgotten it."""

    def __init__(self, broker: Broker, seconds: float, scale: Scale) -> None:
        self._broker, self._seconds, self._scale = broker, seconds, scale
        self._declared = False

    async def declare(self) -> None:
        """Idempotent. Raises what `declaration.declare_stream` raises."""
        if not self._declared:
            await declaration.declare_stream(self._broker, _stream(self._seconds), self._scale)
            self._declared = True

    def doubt(self) -> None:
        """The broker did not answer as it should."""
        self._declared = False


def subject(*tokens: str) -> str:
    """Where a value is kept; `*` stands for any token."""
    return ".".join(["$KV", NAME, *tokens])


def _stream(seconds: float) -> StreamConfig:
    return StreamConfig(
        name=STREAM,
        subjects=[subject(">")],
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        max_age=seconds,
        storage=StorageType.MEMORY,
        allow_direct=True,
        allow_rollup_hdrs=True,
        deny_delete=True,
    )
