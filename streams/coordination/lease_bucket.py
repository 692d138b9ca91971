"""The KV bucket of leases and members (ADR-8): in memory, values live for one lease."""

from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from streams.broker import declaration
from streams.broker.connection import Broker
from streams.topology import Scale

BUCKET_NAME = "leases"
STREAM = f"KV_{BUCKET_NAME}"
RENEWALS_PER_LEASE = 5  # of a value, in one lease
DELETE_HEADERS = {"KV-Operation": "DEL"}


class LeaseBucket:
    """Declared once; again after `doubt`, since a broker that restarts has forgotten it."""

    def __init__(self, broker: Broker, seconds: float, scale: Scale) -> None:
        self._broker, self._seconds, self._scale = broker, seconds, scale
        self._declared = False

    async def declare(self) -> None:
        """Idempotent. Raises what `declaration.declare_stream` raises."""
        if not self._declared:
            await declaration.declare_stream(
                self._broker, _stream_config(self._seconds), self._scale
            )
            self._declared = True

    def mark_undeclared(self) -> None:
        """The broker did not answer as it should."""
        self._declared = False


def key_subject(*tokens: str) -> str:
    """Where a value is kept; `*` stands for any token."""
    return ".".join(["$KV", BUCKET_NAME, *tokens])


def _stream_config(seconds: float) -> StreamConfig:
    return StreamConfig(
        name=STREAM,
        subjects=[key_subject(">")],
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        max_age=seconds,
        storage=StorageType.MEMORY,
        allow_direct=True,
        allow_rollup_hdrs=True,
        deny_delete=True,
    )
