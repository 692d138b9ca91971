"""KV bucket of leases and memberships (ADR-8): in memory, each value lives for one lease."""

from nats.js.api import DiscardPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from streams.broker import declaration
from streams.broker.broker_client import Broker, StreamMissing
from streams.topology import Scale

BUCKET_NAME = "leases"
STREAM = f"KV_{BUCKET_NAME}"
RENEWALS_PER_LEASE = 5  # how often a value is renewed within its lifetime
_ASSUMED_SECONDS = 2.0  # of a value, while the bucket has not told
DELETE_HEADERS = {"KV-Operation": "DEL"}


class LeaseBucket:
    """The bucket of leases and memberships, as one process makes sure that it exists.

    With `seconds` this process declares the bucket, whose values expire after that time; without,
    it reads the time from the broker and asks for a bucket that is missing. The bucket is in the
    broker's memory, so a broker that restarts has lost it: call `mark_unknown` after an error, and
    `open` then looks again.
    """

    def __init__(self, broker: Broker, seconds: float | None = None, replicas: int = 1) -> None:
        self._broker, self._declared_seconds, self._replicas = broker, seconds, replicas
        self._is_known = False
        self.seconds = seconds or _ASSUMED_SECONDS

    @property
    def renew_seconds(self) -> float:
        """The interval at which a value is to be renewed, in seconds."""
        return self.seconds / RENEWALS_PER_LEASE

    async def open(self) -> None:
        """Make sure that the bucket exists; ask the broker at first and after `mark_unknown`.

        Then `seconds` is how long its values live. Raises `TopologyMismatch` if the broker refuses
        the bucket, `BrokerUnavailable` if it does not answer or there is no bucket.
        """
        if self._is_known:
            return
        if self._declared_seconds:
            config = _stream_config(self._declared_seconds)
            await declaration.declare_stream(self._broker, config, Scale(self._replicas))
        else:
            self.seconds = await self._read_seconds()
        self._is_known = True

    async def _read_seconds(self) -> float:
        try:
            info = await declaration.stream_info(self._broker, STREAM)
        except NotFoundError:
            raise StreamMissing(f"there is no bucket {BUCKET_NAME!r}") from None
        return info.config.max_age or _ASSUMED_SECONDS

    def mark_unknown(self) -> None:
        """Note that the bucket may be gone; the next `open` asks the broker again."""
        self._is_known = False


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
