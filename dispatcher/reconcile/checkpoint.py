"""Checkpoints of tenants' counters and demand, and of the service rate, for a successor. Pure.

Requests in flight are left out, since WORK has them; what has ended since is in the ledger.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Self

from dispatcher.dispatching.model_state import ModelState
from dispatcher.estimate.service_rate import RateCheckpoint
from dispatcher.queueing.tenant_state import (
    MEAN_WINDOW_REQUESTS,
    DecayingFlow,
    RunningMean,
    TenantState,
)
from streams import messages

MAX_TENANTS = 15_000  # about half a megabyte


class TenantCheckpoint(NamedTuple):
    """A tenant's state in a checkpoint, without what it was charged for requests in flight.

    The counter is its service so far over its weight, in virtual tokens. `demand_tokens` and
    `demand_squares` are decaying sums of its requests' sizes and of their squares.
    """

    counter: float
    mean_output: float  # generated tokens of a request, the mean over `learned_requests`
    learned_requests: int
    demand_tokens: int
    demand_squares: int


@dataclass(frozen=True)
class Checkpoint:
    """The tenants of a model, and how fast their requests are served, at the time `at`.

    A leader stores a checkpoint for the next leader. It includes all requests with records in the
    stream LEDGER up to the sequence `ledger_seq`, and no request in flight. `at` is epoch seconds.
    """

    at: float
    ledger_seq: int
    tenants: dict[str, TenantCheckpoint]
    service_rate: RateCheckpoint | None = None  # None in checkpoints of earlier releases

    def pack(self) -> bytes:
        """Return the checkpoint as msgpack, for `unpack`."""
        return messages.pack((self.at, self.ledger_seq, self.tenants, self.service_rate))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the checkpoint that `pack` encoded.

        Raises TypeError or ValueError for a checkpoint of a release that has other fields.
        """
        at, ledger, rows, *rest = messages.unpack(data)
        tenants = {tenant: TenantCheckpoint(*row) for tenant, row in rows.items()}
        return cls(at, ledger, tenants, RateCheckpoint.from_wire(rest[0]) if any(rest) else None)


def capture(state: ModelState, ledger_seq: int, now: float) -> Checkpoint:
    """Return a checkpoint of the tenants that differ from new ones, and of the service rate.

    These are the tenants with queued requests, with recent demand, or with a counter above the
    lowest. Beyond `MAX_TENANTS`, those with queued requests are kept first, then those with the
    most service. `ledger_seq` is the last sequence of the stream LEDGER; `now` is epoch seconds.
    """
    charged, lowest = _charged_in_flight(state), state.queue.lowest_counter()
    for tenant_state in state.queue.capacity_shares.tenants.values():
        tenant_state.demand.decay(now)
    tenant_states = {
        tenant: tenant_state
        for tenant, tenant_state in state.queue.capacity_shares.tenants.items()
        if tenant_state.queued_requests
        or tenant_state.counter > lowest
        or round(tenant_state.demand.sizes)
    }
    captured = {
        t: _capture_tenant(tenant_state, charged.get(t, 0))
        for t, tenant_state in tenant_states.items()
    }
    ranks = {
        t: (tenant_states[t].queued_requests > 0, saved.counter) for t, saved in captured.items()
    }
    kept = heapq.nlargest(MAX_TENANTS, ranks, key=ranks.__getitem__)
    rate = state.estimator.service_rate.capture()
    return Checkpoint(now, ledger_seq, {tenant: captured[tenant] for tenant in kept}, rate)


def _charged_in_flight(state: ModelState) -> dict[str, int]:
    """The virtual tokens that each tenant was charged for requests that have not ended."""
    charged: dict[str, int] = {}
    for flight in state.in_flight.values():
        charged[flight.tenant] = charged.get(flight.tenant, 0) + flight.charged
    return charged


def _capture_tenant(tenant_state: TenantState, charged: int) -> TenantCheckpoint:
    counter, mean_output, demand = (
        tenant_state.counter,
        tenant_state.mean_output,
        tenant_state.demand,
    )
    return TenantCheckpoint(
        round(counter - charged / tenant_state.weight, 1),
        round(mean_output.value, 1),
        mean_output.count,
        round(demand.sizes),
        round(demand.squares),
    )


def restore(state: ModelState, checkpoint: Checkpoint) -> None:
    """Set the state of a new leader to its predecessor's checkpoint.

    `state` must be empty: call this before anything else is recorded. Requests in flight are not
    part of a checkpoint, so that the leader has to learn of them otherwise.
    """
    shares = state.queue.capacity_shares
    for tenant, saved in checkpoint.tenants.items():
        demand = DecayingFlow(saved.demand_tokens, saved.demand_squares, checkpoint.at)
        shares.restore(tenant, saved.counter, demand)
        shares.get_tenant(tenant).mean_output = RunningMean(
            saved.mean_output, saved.learned_requests
        )
    state.queue.restore_baseline(checkpoint.at, _overall_mean(checkpoint.tenants.values()))
    if checkpoint.service_rate:
        state.estimator.service_rate.restore(checkpoint.service_rate)


def _overall_mean(captured: Collection[TenantCheckpoint]) -> RunningMean:
    """The mean of generated tokens per request over all tenants, and its number of requests."""
    requests = sum(saved.learned_requests for saved in captured)
    tokens = sum(saved.learned_requests * saved.mean_output for saved in captured)
    return RunningMean(tokens / max(1, requests), min(requests, MEAN_WINDOW_REQUESTS))
