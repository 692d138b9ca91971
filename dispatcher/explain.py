"""Why a request waits: what `millstream why` asks a leader, as plain data. Pure.

Times are seconds; `now` is epoch time. What is ahead is as the fair order will serve it (see
`backlog`): of the tenant itself what it has queued before, of each other tenant what is served
until then.
"""

from collections import Counter
from typing import Any

from dispatcher.dispatching.model_state import ModelState
from dispatcher.queueing.queue_position import LaneBacklog, collect_backlogs
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.workers.placements import InFlightRequest
from streams.messages import Heartbeat
from streams.subjects import Priority

Facts = dict[str, Any]


def explain_request(
    books: ModelState, request_id: str, version: str | None, now: float
) -> Facts | None:
    """How a request stands; None for one that neither waits nor runs.

    `version` is the one that would serve it.
    """
    if item := books.queue.get(request_id):
        return _queued(books, item, version, now) | {
            "tenant_stands": explain_tenant(books, item.tenant)
        }
    if flight := books.in_flight.get(request_id):
        return _in_flight(books, request_id, flight, now)
    return None


def explain_tenant(books: ModelState, tenant: str) -> Facts:
    """What a tenant has waiting and running here, what it was charged, and its share of late."""
    pressure = books.build_pressure()
    waiting = Counter[str]()
    for name, priority, lane in books.queue.tenant_queues():
        if name == tenant:
            waiting[priority] += lane.queued
    held = [flight for flight in books.in_flight.values() if flight.tenant == tenant]
    return {
        "tenant": tenant,
        "model": books.model,
        "weight": books.queue.weight(tenant),
        "counter": round(books.queue.counter(tenant), 1),
        "queued": dict(waiting),
        "in_flight": len(held),
        "in_flight_tokens": sum(flight.cost for flight in held),
        "times_its_share": times_its_share(books, tenant),
        "estimated_wait_seconds": {p.value: pressure.estimated_wait(tenant, p) for p in Priority},
        "fleet": _fleet(books.fleet.last_heartbeats()),
    }


def times_its_share(books: ModelState, tenant: str) -> float | None:
    """What it has used in the last minute over its weight's part; None if nobody used anything.

    The part is of those that have used anything, wait or run.
    """
    used = books.recent_usage()
    if not used:
        return None
    flying = {flight.tenant for flight in books.in_flight.values()}
    waiting = {name for name, _, _ in books.queue.tenant_queues()}
    weights = sum(books.queue.weight(t) for t in {tenant, *used, *flying, *waiting})
    part = books.queue.weight(tenant) / weights * sum(used.values())
    return round(used.get(tenant, 0.0) / part, 2)


def find_blocking_reason(books: ModelState, version: str | None, cost: int) -> str:
    """Why a request of this cost that would be next is not sent at once."""
    workers = books.fleet.last_heartbeats()
    if not workers:
        return "no_workers"
    of_version = [beat for beat in workers if beat.version == version]
    if not of_version:
        return "no_worker_of_version"
    taking = [beat for beat in of_version if not beat.draining]
    if not taking:
        return "draining"
    if all(beat.free_sequences <= 0 for beat in taking):
        return "no_free_sequences"
    if all(beat.free_tokens < cost for beat in taking):
        return "no_free_tokens"
    return "kept_for_others"


def _queued(books: ModelState, item: QueuedRequest, version: str | None, now: float) -> Facts:
    before = [each for each in _own(books, item.tenant, item.priority) if each.seq < item.seq]
    others = _others_ahead(books, item, sum(each.cost for each in before))
    requests, tokens = others["requests"] + len(before), others["tokens"]
    tokens += sum(each.cost for each in before)
    return {
        "request_id": item.request_id,
        "state": "queued",
        "tenant": item.tenant,
        "model": books.model,
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
        "estimated_wait_seconds": _rounded(
            books.estimator.service_rate.estimate_wait(tokens + item.cost)
        ),
        "reason": "behind_others" if requests else find_blocking_reason(books, version, item.cost),
    }


def _own(books: ModelState, tenant: str, priority: Priority) -> list[QueuedRequest]:
    lanes = (lane for t, p, lane in books.queue.tenant_queues() if (t, p) == (tenant, priority))
    return [item for lane in lanes for item in lane.items if not item.is_removed]


def _others_ahead(books: ModelState, item: QueuedRequest, own_tokens: int) -> dict[str, int]:
    """Requests and tokens of others: all that is more urgent, and of its like up to its level."""
    charge, queue = books.estimator.service_rate.charge_per_token, books.queue
    waiting = collect_backlogs(queue)
    level = queue.counter(item.tenant) + charge * own_tokens / queue.weight(item.tenant)
    requests = tokens = 0.0
    for priority, theirs in waiting.items():
        for basin in theirs:
            part = 1.0
            if priority is item.priority:
                weight = queue.weight(basin.tenant)
                part = _part(basin, item, basin.tokens_below(level, charge, weight))
            requests += part * basin.requests
            tokens += part * basin.tokens
        if priority is item.priority:
            break
    return {"requests": round(requests), "tokens": round(tokens)}


def _part(basin: LaneBacklog, item: QueuedRequest, tokens: float) -> float:
    """The part of a backlog that so many tokens are; of its own tenant's, nothing."""
    return 0.0 if basin.tenant == item.tenant else tokens / basin.tokens


def _in_flight(books: ModelState, request_id: str, flight: InFlightRequest, now: float) -> Facts:
    return {
        "request_id": request_id,
        "state": "in_flight",
        "tenant": flight.tenant,
        "model": books.model,
        "version": flight.version,
        "priority": flight.priority.value,
        "reserved_tokens": flight.cost,
        "dispatched_seconds_ago": round(now - flight.dispatched_at, 3),
        "deadline_in_seconds": round(flight.deadline / 1000 - now, 3),
        "is_pulled": bool(flight.seq) and flight.seq not in books.fleet.pending_sequences,
    }


def _fleet(beats: list[Heartbeat]) -> list[Facts]:
    names = "worker", "version", "free_sequences", "free_tokens", "running", "waiting", "draining"
    return [{name: getattr(beat, name) for name in names} for beat in beats]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
