"""What a leader leaves to its successor: what tenants have had, and what they asked for. Pure.

What is in flight is not in it, since `WORK` tells that; what has ended since is in the ledger.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Self

from dispatcher.accounts import LEARNED_REQUESTS, Account, Flow, Mean
from dispatcher.books import Books
from streams import messages

MOST = 15_000  # tenants: about half a megabyte


class Standing(NamedTuple):
    """One tenant's, with nothing in flight; `asked` and `squares` are those of its demand."""

    counter: float
    generated: float  # the mean tokens of its requests, and over how many
    requests: int
    asked: int
    squares: int


@dataclass(frozen=True)
class Checkpoint:
    """The tenants of a model at a time (epoch seconds), with all of LEDGER up to a sequence."""

    at: float
    ledger: int
    tenants: dict[str, Standing]

    def pack(self) -> bytes:
        return messages.pack((self.at, self.ledger, self.tenants))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        at, ledger, rows = messages.unpack(data)
        return cls(at, ledger, {tenant: Standing(*row) for tenant, row in rows.items()})


def take(books: Books, ledger: int, now: float) -> Checkpoint:
    """How tenants stand that differ from newcomers; of too many, those that wait or had most."""
    charged, lowest = _in_flight(books), books.queue.lowest_counter()
    for account in books.queue.division.accounts.values():
        account.demand.fade(now)
    accounts = {
        tenant: account
        for tenant, account in books.queue.division.accounts.items()
        if account.waiting or account.counter > lowest or round(account.demand.sizes)
    }
    standings = {t: _standing(account, charged.get(t, 0)) for t, account in accounts.items()}
    ranks = {t: (accounts[t].waiting > 0, standing.counter) for t, standing in standings.items()}
    kept = heapq.nlargest(MOST, ranks, key=ranks.__getitem__)
    return Checkpoint(now, ledger, {tenant: standings[tenant] for tenant in kept})


def _in_flight(books: Books) -> dict[str, int]:
    """What each tenant was charged for what has not ended, in virtual tokens."""
    charged: dict[str, int] = {}
    for flight in books.in_flight.values():
        charged[flight.tenant] = charged.get(flight.tenant, 0) + flight.charged
    return charged


def _standing(account: Account, charged: int) -> Standing:
    counter, learned, demand = account.counter, account.generated, account.demand
    return Standing(
        round(counter - charged / account.weight, 1),
        round(learned.value, 1),
        learned.count,
        round(demand.sizes),
        round(demand.squares),
    )


def restore(books: Books, checkpoint: Checkpoint) -> None:
    """Let a new leader's books, which are empty, begin where its predecessor's were."""
    division = books.queue.division
    for tenant, standing in checkpoint.tenants.items():
        demand = Flow(standing.asked, standing.squares, checkpoint.at)
        division.restore(tenant, standing.counter, demand)
        division.account(tenant).generated = Mean(standing.generated, standing.requests)
    books.queue.restored(checkpoint.at, _mean(checkpoint.tenants.values()))


def _mean(standings: Collection[Standing]) -> Mean:
    """Of all their requests, the tokens that each generated."""
    requests = sum(standing.requests for standing in standings)
    tokens = sum(standing.requests * standing.generated for standing in standings)
    return Mean(tokens / max(1, requests), min(requests, LEARNED_REQUESTS))
