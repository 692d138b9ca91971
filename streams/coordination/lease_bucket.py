"""KV bucket of leases and memberships (ADR-8): in memory, each value lives for one lease."""

from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.topology import Scale

BUCKET_NAME = "leases"
STREAM = f"KV_{BUCKET_NAME}"
RENEWALS_PER_LEASE = 5  # how often a value is renewed within its lifetime
DELETE_HEADERS = {"KV-Operation": "DEL"}


class LeaseBucket:
    """The bucket of leases and memberships, as one process makes sure that it exists.

    The bucket is in the broker's memory, so a broker that restarts has lost it: call
    `mark_undeclared` after an error, and `declare` then creates it again. Its values expire after
    `seconds`.
    """

    def __init__(self, broker: Broker, seconds: float, scale: Scale) -> None:
        self._broker, self._seconds, self._scale = broker, seconds, scale
        self._declared = False

    async def declare(self) -> None:
        """Create the bucket if missing; ask the broker only at first and after `mark_undeclared`.

        Raises `TopologyMismatch` if the broker refuses, `BrokerUnavailable` if it does not answer.
        """
        if not self._declared:
            await declaration.declare_stream(
                self._broker, _stream_config(self._seconds), self._scale
            )
            self._declared = True

    def mark_undeclared(self) -> None:
        """Note that the bucket may be gone; the next `declare` asks the broker again."""
        self._declared = False


def key_subject(*tokens: str) -> str:
    """Return the subject that stores a key's value; a key has one or more tokens, or wildcards."""
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
