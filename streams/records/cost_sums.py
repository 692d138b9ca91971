"""Sums of what workers have cost, by what their time was spent on. Pure."""

from dataclasses import dataclass
from typing import Any, Self

from streams.messages import LedgerRecord
from streams.records.worker_time import WorkerTime
from streams.usage_accounts import WorkerPrice, format_cost


@dataclass(frozen=True)
class CostSums:
    """Nanoseconds of workers and their costs, for one model, kind of machine and currency.

    `worker` is all of it. `requests` is what ledger records of requests have, `lost` what attempts
    took that did not end their requests. Costs are nanoseconds times `WorkerPrice.per_hour`.
    """

    worker: int = 0
    requests: int = 0
    idle: int = 0
    load: int = 0
    lost: int = 0
    worker_cost: int = 0
    requests_cost: int = 0
    idle_cost: int = 0
    load_cost: int = 0
    lost_cost: int = 0

    @classmethod
    def of_request(cls, record: LedgerRecord) -> Self:
        """Return the sums of one request."""
        price = WorkerPrice.unpack(record.worker_price).per_hour
        return cls(requests=record.compute_ns, requests_cost=record.compute_ns * price)

    @classmethod
    def of_worker(cls, time: WorkerTime) -> Self:
        """Return the sums of one record of a worker's time."""
        spent = (time.elapsed_ns, 0, time.idle_ns, time.load_ns, time.lost_ns)
        price = WorkerPrice.unpack(time.worker_price).per_hour
        return cls(*spent, *(each * price for each in spent))

    def __add__(self, other: "CostSums") -> "CostSums":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return CostSums(*(one + another for one, another in pairs))

    @property
    def open(self) -> int:
        """Nanoseconds of which nobody has told: of requests that run, and of killed workers.

        Below 0 while requests have ended since their worker last told of its time.
        """
        return self.worker - self.requests - self.idle - self.load - self.lost

    @property
    def open_cost(self) -> int:
        """The cost of `open`."""
        told = self.requests_cost + self.idle_cost + self.load_cost + self.lost_cost
        return self.worker_cost - told

    def to_json(self) -> dict[str, Any]:
        """Return nanoseconds, exact costs, and amounts of the currency, each by use."""
        uses = ("worker", "requests", "idle", "load", "lost", "open")
        costs = {use: getattr(self, f"{use}_cost") for use in uses}
        return {
            "nanoseconds": {use: getattr(self, use) for use in uses},
            "costs": costs,
            "amounts": {use: format_cost(cost) for use, cost in costs.items()},
        }
