"""Explains why a request waits, as plain data for `millstream why`. Pure.

Times are seconds; `now` is epoch seconds. What counts as ahead of a request is what the fair order
will serve before it (see `queue_position`): of its own tenant what that has queued before, of each
other tenant what is served until then.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from dispatcher.dispatching.model_state import ModelState
from dispatcher.queueing.queue_position import LaneBacklog, collect_backlogs
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.workers.placed_requests import InFlightRequest
from streams.messages import Heartbeat
from streams.subjects import Priority

Facts = dict[str, Any]
_NO_SUBMISSIONS: Mapping[tuple[str, Priority], int] = {}


def explain_request(
    state: ModelState,
    request_id: str,
    version: str | None,
    now: float,
    submissions: Mapping[tuple[str, Priority], int] = _NO_SUBMISSIONS,
) -> Facts | None:
    """Return facts on where a request stands, as JSON data; None if it is not known here.

    Their entry `state` is `queued` or `in_flight` (dispatched to the workers and not ended). For a
    queued request they tell how much is ahead of it, its estimated wait, and why it waits; for one
    in flight, its version, how long ago it was dispatched, and whether a worker has pulled it. None
    means that it is neither queued nor in flight. `version` is the id of the model version that
    would serve a queued request, None if that is gone; it is not used for one in flight. `now` is
    epoch seconds. `submissions` are as for `explain_tenant`.
    """
    if item := state.queue.get(request_id):
        return _queued(state, item, version, now) | {
            "tenant_stands": explain_tenant(state, item.tenant, submissions)
        }
    if flight := state.in_flight.get(request_id):
        return _in_flight(state, request_id, flight, now)
    return None


def explain_tenant(
    state: ModelState,
    tenant: str,
    submissions: Mapping[tuple[str, Priority], int] = _NO_SUBMISSIONS,
) -> Facts:
    """Return facts on where a tenant stands, as JSON data.

    They are its weight, its counter (service so far over its weight, in virtual tokens), its
    submissions over NATS that no gateway has accepted yet and its queued requests, both by
    priority, the number and reserved tokens of its requests in flight, its recent usage over its
    fair share, its estimated waits in seconds by priority, and the last heartbeat of each worker. A
    tenant without requests is answered, too, with zeros. `submissions` are those of all tenants.
    """
    pressure = state.build_pressure()
    waiting = Counter[str]()
    for name, priority, tenant_queue in state.queue.tenant_queues():
        if name == tenant:
            waiting[priority] += tenant_queue.queued
    held = [flight for flight in state.in_flight.values() if flight.tenant == tenant]
    return {
        "tenant": tenant,
        "model": state.model,
        "weight": state.queue.weight(tenant),
        "counter": round(state.queue.counter(tenant), 1),
        "submissions": {p.value: n for (name, p), n in submissions.items() if name == tenant},
        "queued": dict(waiting),
        "in_flight": len(held),
        "in_flight_tokens": sum(flight.cost for flight in held),
        "times_its_share": times_its_share(state, tenant),
        "estimated_wait_seconds": {p.value: pressure.estimated_wait(tenant, p) for p in Priority},
        "fleet": _fleet(state.fleet.last_heartbeats()),
    }


def times_its_share(state: ModelState, tenant: str) -> float | None:
    """Return a tenant's service in about the last minute over its fair share of all service.

    1.0 is exactly its fair share, which is by weight among the tenants that have used anything,
    wait or run. None if no tenant has used anything. Rounded to two decimals.
    """
    usage = state.recent_usage()
    if not usage:
        return None
    in_flight_tenants = {flight.tenant for flight in state.in_flight.values()}
    waiting = {name for name, _, _ in state.queue.tenant_queues()}
    weights = sum(state.queue.weight(t) for t in {tenant, *usage, *in_flight_tenants, *waiting})
    fair_usage = state.queue.weight(tenant) / weights * sum(usage.values())
    return round(usage.get(tenant, 0.0) / fair_usage, 2)


def find_blocking_reason(state: ModelState, version: str | None, item: QueuedRequest) -> str:
    """Return a word for why `item`, the next request, is not sent to a worker at once.

    `version` is the id of the model version that would serve it, None if that is gone. The words
    are `no_workers`, `no_worker_of_version`, `draining` (all of the version's workers are shutting
    down), `no_free_sequences` and `no_free_tokens` (nothing is free, or requests on their way will
    take it), `kept_for_others` (the free capacity is kept for other tenants), and `being_sent` if
    none of these holds.
    """
    workers = state.fleet.last_heartbeats()
    if not workers:
        return "no_workers"
    of_version = [beat for beat in workers if beat.version == version]
    if version is None or not of_version:
        return "no_worker_of_version"
    taking = [beat for beat in of_version if not beat.draining]
    if not taking:
        return "draining"
    if all(beat.free_sequences <= 0 for beat in taking):
        return "no_free_sequences"
    if all(beat.free_tokens < item.cost for beat in taking):
        return "no_free_tokens"
    if state.kept_tokens(item, version):
        return "kept_for_others"
    return _pending_work_in_the_way(state, version, item) or "being_sent"


def _pending_work_in_the_way(state: ModelState, version: str, item: QueuedRequest) -> str | None:
    """Return what is short if work that was sent and not yet pulled counts as running, or None."""
    priority = state.choose_work_priority(item, version)
    if not state.fleet.has_free_sequences(version, priority):
        return "no_free_sequences"
    has_tokens = state.fleet.has_room_for(version, priority, item.cost)
    if not has_tokens or not state.fleet.has_worker_with_room(version, priority, item.cost):
        return "no_free_tokens"
    return None


def _queued(state: ModelState, item: QueuedRequest, version: str | None, now: float) -> Facts:
    before = [each for each in _own(state, item.tenant, item.priority) if each.seq < item.seq]
    others = _others_ahead(state, item, sum(each.cost for each in before))
    requests, tokens = others["requests"] + len(before), others["tokens"]
    tokens += sum(each.cost for each in before)
    needed = tokens + item.cost + _missing_headroom(state, item, version)
    return {
        "request_id": item.request_id,
        "state": "queued",
        "tenant": item.tenant,
        "model": state.model,
        "version": version,
        "pinned": bool(item.version),
        "priority": item.priority.value,
        "prompt_tokens": item.prompt_tokens,
        "reserved_tokens": item.cost,
        "waited_seconds": round(now - item.accepted / 1000, 3),
        "deadline_in_seconds": round(item.deadline / 1000 - now, 3),
        "ahead_of_its_tenant": len(before),
        "ahead": requests,
        "ahead_tokens": tokens,
        "estimated_wait_seconds": _rounded(state.estimator.service_rate.estimate_wait(needed)),
        "reason": "behind_others" if requests else find_blocking_reason(state, version, item),
    }


def _missing_headroom(state: ModelState, item: QueuedRequest, version: str | None) -> float:
    """Tokens that must come free, besides those of the request, since they are kept for others."""
    kept = state.kept_tokens(item, version) if version else 0.0
    return max(0.0, kept - state.fleet.free_capacity(item.priority).tokens)


def _own(state: ModelState, tenant: str, priority: Priority) -> list[QueuedRequest]:
    """A tenant's queued requests of one priority."""
    tenant_queues = (
        tenant_queue
        for t, p, tenant_queue in state.queue.tenant_queues()
        if (t, p) == (tenant, priority)
    )
    return [
        item for tenant_queue in tenant_queues for item in tenant_queue.items if not item.is_removed
    ]


def _others_ahead(state: ModelState, item: QueuedRequest, own_tokens: int) -> dict[str, int]:
    """Requests and tokens of other tenants that are served first.

    These are all that are more urgent, and those of the same priority up to the counter that the
    request's tenant will have at its turn.
    """
    charge, queue = state.estimator.service_rate.charge_per_token, state.queue
    waiting = collect_backlogs(queue)
    level = queue.counter(item.tenant) + charge * own_tokens / queue.weight(item.tenant)
    requests = tokens = 0.0
    for priority, backlogs in waiting.items():
        for backlog in backlogs:
            fraction = 1.0
            if priority is item.priority:
                weight = queue.weight(backlog.tenant)
                fraction = _fraction(backlog, item, backlog.tokens_below(level, charge, weight))
            requests += fraction * backlog.requests
            tokens += fraction * backlog.tokens
        if priority is item.priority:
            break
    return {"requests": round(requests), "tokens": round(tokens)}


def _fraction(backlog: LaneBacklog, item: QueuedRequest, tokens: float) -> float:
    """The fraction of a backlog that so many tokens are; 0 for the request's own tenant."""
    return 0.0 if backlog.tenant == item.tenant else tokens / backlog.tokens


def _in_flight(state: ModelState, request_id: str, flight: InFlightRequest, now: float) -> Facts:
    return {
        "request_id": request_id,
        "state": "in_flight",
        "tenant": flight.tenant,
        "model": state.model,
        "version": flight.version,
        "priority": flight.priority.value,
        "reserved_tokens": flight.cost,
        "dispatched_seconds_ago": round(now - flight.dispatched_at, 3),
        "deadline_in_seconds": round(flight.deadline / 1000 - now, 3),
        "is_pulled": bool(flight.seq) and flight.seq not in state.fleet.pending_sequences,
    }


def _fleet(heartbeats: list[Heartbeat]) -> list[Facts]:
    names = (
        *("worker", "version", "free_sequences", "free_tokens", "running", "waiting"),
        *("draining", "reclaiming"),
    )
    return [{name: getattr(beat, name) for name in names} for beat in heartbeats]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
