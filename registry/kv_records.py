"""Records of one KV bucket, of one or several types, kept current and looked up without waiting."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, Self, TypeVar

from registry.kv_view import OPEN_SECONDS, ChangeRecorder, Declares, KvView, never
from streams.broker.broker_client import Broker

R = TypeVar("R")


class KvRecords(ABC, Generic[R]):
    """The records of the bucket that a subclass names by `bucket`, as a live view.

    A subclass decodes records by `_decode`. Methods that write also raise `BrokerUnavailable` if
    the broker does not answer, or `StoreRefused`.
    """

    bucket: ClassVar[str]

    def __init__(self, broker: Broker, declares: Declares = never, replicas: int = 1) -> None:
        self._view = KvView[R](broker, self.bucket, self._decode, declares, replicas)

    @classmethod
    async def open(
        cls,
        broker: Broker,
        *,
        seconds: float = OPEN_SECONDS,
        declares: Declares = never,
        replicas: int = 1,
    ) -> Self:
        """Return the records once they are loaded; they are kept current until `close`.

        Raises `BrokerUnavailable` if they have not come after `seconds`. While `declares()` returns
        True, a bucket that is missing is made, and one that is lost is made anew with the contents
        that it had.
        """
        records = cls(broker, declares, replicas)
        await records._view.open(seconds)
        return records

    async def close(self) -> None:
        """Stop following changes; what is loaded stays as it is. Idempotent."""
        await self._view.close()

    def check_bucket(self, stream: str) -> None:
        """Look soon whether the bucket is there, if `stream` is its stream."""
        self._view.check_bucket(stream)

    def record_changes(self, recorder: ChangeRecorder[R]) -> None:
        """Have `recorder` entered before each write is stored, and left with its outcome.

        What it raises before the write is raised by the method that writes, and nothing is stored.
        """
        self._view.recorder = recorder

    def on_change(self, observer: Callable[[], None]) -> None:
        """Register `observer` to be called after each change of any record; returns at once.

        It is called without arguments on the event loop and must neither block nor raise.
        """
        self._view.on_change(observer)

    @staticmethod
    @abstractmethod
    def _decode(key: str, value: bytes) -> R:
        """Return the record stored under a key; raises ValueError for one that is none."""
