"""The report that `millstream lag` asks a leader for: lanes and workers, as plain data."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from dispatcher.dispatching.model_state import ModelState
from streams.messages import Heartbeat
from streams.subjects import Priority

_Key = tuple[str, Priority]
MAX_LANES = 2000  # the deepest; a report must fit one message


def build_lag_report(
    state: ModelState, now: float, submissions: Mapping[_Key, int]
) -> dict[str, Any]:
    """Return the report that `millstream lag` shows for one model, as JSON data.

    It has an entry (lane) for each tenant and priority with requests queued or in flight, or with
    submissions that wait to be accepted (`submissions` counts these): those with the most queued
    tokens first, `MAX_LANES` at most, and `lanes_left_out` counts the rest. It also has the last
    heartbeat of each worker. Ages and waits are seconds; `now` is epoch seconds.
    """
    lanes = sorted(
        _lanes(state, now, submissions), key=lambda lane: (-lane["tokens"], -lane["submissions"])
    )
    return {
        "model": state.model,
        "lanes": lanes[:MAX_LANES],
        "lanes_left_out": max(0, len(lanes) - MAX_LANES),
        "workers": [_worker(state, beat) for beat in state.fleet.last_heartbeats()],
    }


def _worker(state: ModelState, beat: Heartbeat) -> dict[str, Any]:
    """A worker's last heartbeat, with the number of prefix and adapter hashes that it holds."""
    report = asdict(replace(beat, progress=[], holds=b"", dropped=b""))
    del report["holds"], report["dropped"], report["holds_only"]
    return report | {"marks": state.prefix_router.get_index(beat.version).count_hashes(beat.worker)}


def _lanes(state: ModelState, now: float, submissions: Mapping[_Key, int]) -> list[dict[str, Any]]:
    in_flight = Counter((f.tenant, f.priority) for f in state.in_flight.values())
    pressure = state.build_pressure()
    queued, tokens, accepted = _waiting(state)
    return [
        {
            "tenant": tenant,
            "model": state.model,
            "priority": str(priority),
            "submissions": submissions.get((tenant, priority), 0),
            "queued": queued[tenant, priority],
            "tokens": tokens[tenant, priority],
            "oldest_age_seconds": _age(accepted.get((tenant, priority)), now),
            "in_flight": in_flight[tenant, priority],
            "estimated_wait_seconds": pressure.estimated_wait(tenant, priority),
        }
        for tenant, priority in queued.keys() | in_flight.keys() | submissions.keys()
    ]


def _waiting(state: ModelState) -> tuple[Counter[_Key], Counter[_Key], dict[_Key, int]]:
    """Requests, tokens and the oldest acceptance (epoch ms) by lane, over all pinned versions."""
    queued, tokens, accepted = Counter[_Key](), Counter[_Key](), dict[_Key, int]()
    for tenant, priority, tenant_queue in state.queue.tenant_queues():
        key = tenant, priority
        queued[key] += tenant_queue.queued
        tokens[key] += tenant_queue.tokens
        accepted[key] = min(
            tenant_queue.head.accepted, accepted.get(key, tenant_queue.head.accepted)
        )
    return queued, tokens, accepted


def _age(accepted: int | None, now: float) -> float:
    return 0.0 if accepted is None else round(max(0.0, now - accepted / 1000), 3)
