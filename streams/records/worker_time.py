"""Worker time: what of a worker's time was idle, loading or lost, a record a minute in the ledger.

What was spent on requests is in their own records. Pure.
"""

from dataclasses import dataclass
from typing import Self

from streams import subjects
from streams.messages import from_wire, pack, unpack
from streams.usage_accounts import WorkerPrice


@dataclass(frozen=True)
class WorkerTime:
    """One worker's time of one model between `since` and `until`, which are epoch milliseconds.

    `elapsed_ns` is all that belongs to the model: `idle_ns`, `load_ns` (with warm-up), and the time
    of its engine's steps. Of the latter `lost_ns` is in no request's record: the attempts did not
    end their requests. `worker_price` is a packed `WorkerPrice`, empty if it has none.
    """

    worker: str
    model: str
    version: str
    since: int
    until: int
    elapsed_ns: int
    idle_ns: int
    load_ns: int
    lost_ns: int
    worker_type: str = ""
    worker_price: str = ""

    @property
    def subject(self) -> str:
        """The subject on which the record is stored."""
        return subjects.worker_time(self.model, self.worker)

    def pack(self) -> bytes:
        """Return the record encoded as msgpack."""
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the record that `pack` encoded; unknown fields are ignored.

        Raises ValueError for bytes that are not msgpack and for a price of another form, TypeError
        if a field is missing.
        """
        record = from_wire(cls, unpack(data))
        WorkerPrice.unpack(record.worker_price)
        return record
