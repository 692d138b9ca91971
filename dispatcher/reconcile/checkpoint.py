"""What a leader leaves to its successor: what tenants have had, and what they asked for. Pure.

What is in flight is not in it, since `WORK` tells that; what has ended since is in the ledger.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Self

from dispatcher.dispatching.model_state import ModelState
from dispatcher.queueing.tenant_state import (
    MEAN_WINDOW_REQUESTS,
    DecayingFlow,
    RunningMean,
    TenantState,
)
from streams import messages

MAX_TENANTS = 15_000  # tenants: about half a megabyte


class TenantCheckpoint(NamedTuple):
    """One tenant's, with nothing in flight; `asked` and `squares` are those of its demand."""

    counter: float
    mean_output: float  # the mean tokens of its requests, and over how many
    learned_requests: int
    demand_tokens: int
    demand_squares: int


@dataclass(frozen=True)
class Checkpoint:
    """The tenants of a model at a time (epoch seconds), with all of LEDGER up to a sequence."""

    at: float
    ledger_seq: int
    tenants: dict[str, TenantCheckpoint]

    def pack(self) -> bytes:
        return messages.pack((self.at, self.ledger_seq, self.tenants))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        at, ledger, rows = messages.unpack(data)
        return cls(at, ledger, {tenant: TenantCheckpoint(*row) for tenant, row in rows.items()})


def capture(books: ModelState, ledger: int, now: float) -> Checkpoint:
    """How tenants stand that differ from newcomers; of too many, those that wait or had most."""
    charged, lowest = _charged_in_flight(books), books.queue.lowest_counter()
    for account in books.queue.fair_share.tenants.values():
        account.demand.decay(now)
    accounts = {
        tenant: account
        for tenant, account in books.queue.fair_share.tenants.items()
        if account.queued_requests or account.counter > lowest or round(account.demand.sizes)
    }
    standings = {t: _capture_tenant(account, charged.get(t, 0)) for t, account in accounts.items()}
    ranks = {
        t: (accounts[t].queued_requests > 0, standing.counter) for t, standing in standings.items()
    }
    kept = heapq.nlargest(MAX_TENANTS, ranks, key=ranks.__getitem__)
    return Checkpoint(now, ledger, {tenant: standings[tenant] for tenant in kept})


def _charged_in_flight(books: ModelState) -> dict[str, int]:
    """What each tenant was charged for what has not ended, in virtual tokens."""
    charged: dict[str, int] = {}
    for flight in books.in_flight.values():
        charged[flight.tenant] = charged.get(flight.tenant, 0) + flight.charged
    return charged


def _capture_tenant(account: TenantState, charged: int) -> TenantCheckpoint:
    counter, learned, demand = account.counter, account.mean_output, account.demand
    return TenantCheckpoint(
        round(counter - charged / account.weight, 1),
        round(learned.value, 1),
        learned.count,
        round(demand.sizes),
        round(demand.squares),
    )


def restore(books: ModelState, checkpoint: Checkpoint) -> None:
    """Let a new leader's books, which are empty, begin where its predecessor's were."""
    division = books.queue.fair_share
    for tenant, standing in checkpoint.tenants.items():
        demand = DecayingFlow(standing.demand_tokens, standing.demand_squares, checkpoint.at)
        division.restore(tenant, standing.counter, demand)
        division.get_tenant(tenant).mean_output = RunningMean(
            standing.mean_output, standing.learned_requests
        )
    books.queue.restore_baseline(checkpoint.at, _overall_mean(checkpoint.tenants.values()))


def _overall_mean(standings: Collection[TenantCheckpoint]) -> RunningMean:
    """Of all their requests, the tokens that each generated."""
    requests = sum(standing.learned_requests for standing in standings)
    tokens = sum(standing.learned_requests * standing.mean_output for standing in standings)
    return RunningMean(tokens / max(1, requests), min(requests, MEAN_WINDOW_REQUESTS))
