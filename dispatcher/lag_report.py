"""What `millstream lag` asks a leader for: every lane and every worker, as plain data."""

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from dispatcher.dispatching.model_state import ModelState
from streams.messages import Heartbeat
from streams.subjects import Priority

_Key = tuple[str, Priority]
MAX_LANES = 2000  # the deepest; a report must fit one message


def build_lag_report(books: ModelState, now: float) -> dict[str, Any]:
    """Lanes (deepest first) and workers of one model; times in seconds, `now` since the epoch."""
    lanes = sorted(_lanes(books, now), key=lambda lane: -lane["tokens"])
    return {
        "model": books.model,
        "lanes": lanes[:MAX_LANES],
        "lanes_left_out": max(0, len(lanes) - MAX_LANES),
        "workers": [_worker(books, beat) for beat in books.fleet.last_heartbeats()],
    }


def _worker(books: ModelState, beat: Heartbeat) -> dict[str, Any]:
    """Its last beat, and how many marks of prefixes and adapters it holds."""
    told = asdict(replace(beat, progress=[], holds=b"", dropped=b""))
    del told["holds"], told["dropped"], told["holds_only"]
    return told | {"marks": books.prefix_router.get_index(beat.version).count_hashes(beat.worker)}


def _lanes(books: ModelState, now: float) -> list[dict[str, Any]]:
    flying = Counter((f.tenant, f.priority) for f in books.in_flight.values())
    pressure = books.build_pressure()
    queued, tokens, accepted = _waiting(books)
    return [
        {
            "tenant": tenant,
            "model": books.model,
            "priority": str(priority),
            "queued": queued[tenant, priority],
            "tokens": tokens[tenant, priority],
            "oldest_age_seconds": _age(accepted.get((tenant, priority)), now),
            "in_flight": flying[tenant, priority],
            "estimated_wait_seconds": pressure.estimated_wait(tenant, priority),
        }
        for tenant, priority in queued.keys() | flying.keys()
    ]


def _waiting(books: ModelState) -> tuple[Counter[_Key], Counter[_Key], dict[_Key, int]]:
    """Requests, tokens and the oldest acceptance (ms) by lane, whatever version is pinned."""
    queued, tokens, accepted = Counter[_Key](), Counter[_Key](), dict[_Key, int]()
    for tenant, priority, lane in books.queue.tenant_queues():
        key = tenant, priority
        queued[key] += lane.queued
        tokens[key] += lane.tokens
        accepted[key] = min(lane.head.accepted, accepted.get(key, lane.head.accepted))
    return queued, tokens, accepted


def _age(accepted: int | None, now: float) -> float:
    return 0.0 if accepted is None else round(max(0.0, now - accepted / 1000), 3)
