"""Measures of a run: service over time, times to first token, shares of requests.

The two measures of fairness are those of VTC's artifact (github.com/Ying1123/VTC-artifact,
`fair_bench/plot/visualize.py`): a request's service, prompt + 2 * output tokens, is spread evenly
from its first token to its last, and sampled 100 times while requests come in.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, inf

from bench.simulation.runs import Outcome
from dispatcher.queueing.fair_queue import service_tokens
from simulation.request import RequestSpec, SimulatedRequest

SAMPLES = 100
WINDOW_SECONDS = 60.0

Piece = tuple[float, float, float]  # from, to (seconds), service (virtual tokens)


def service_of(spec: RequestSpec) -> int:
    """Virtual tokens that a request takes when it runs to its end."""
    return service_tokens(spec.prompt_tokens, spec.output_tokens)


def _pieces(requests: Iterable[SimulatedRequest]) -> dict[str, list[Piece]]:
    """The service of completed requests, by tenant; a tenant without one has an empty list."""
    pieces: dict[str, list[Piece]] = {}
    for request in requests:
        tenant_pieces = pieces.setdefault(request.spec.tenant, [])
        if request.completed and request.first is not None and request.ended is not None:
            tenant_pieces.append((request.first, request.ended, service_of(request.spec)))
    return pieces


def _service_between(pieces: Iterable[Piece], start: float, end: float) -> float:
    """The service in virtual tokens between two times."""
    return sum(
        service * max(0.0, min(end, until) - max(start, since)) / max(until - since, 1e-6)
        for since, until, service in pieces
    )


def _sample_times(seconds: float) -> list[float]:
    """The times of `SAMPLES` samples, evenly spaced from 0."""
    return [seconds * number / SAMPLES for number in range(SAMPLES)]


def service_by_tenant(
    requests: Iterable[SimulatedRequest], start: float, end: float
) -> dict[str, float]:
    """Virtual tokens that each tenant got between two times (seconds)."""
    return {
        tenant: _service_between(tenant_pieces, start, end)
        for tenant, tenant_pieces in _pieces(requests).items()
    }


def accumulated_gap(requests: Sequence[SimulatedRequest], seconds: float) -> float:
    """The largest difference between two tenants' service since the start, at any sample."""
    pieces = _pieces(requests).values()
    worst = 0.0
    for time in _sample_times(seconds):
        got = [_service_between(tenant_pieces, 0.0, time) for tenant_pieces in pieces]
        worst = max(worst, max(got) - min(got))
    return worst


def service_differences(requests: Sequence[SimulatedRequest], seconds: float) -> list[float]:
    """Per sample, the sum over tenants of the service per second that they lack.

    Within a window around the sample, a tenant lacks the most that any tenant got less its own
    service, but at most the difference between its service and what it asked for.
    """
    pieces = _pieces(requests)
    asked = [
        (request.spec.at, request.spec.tenant, service_of(request.spec)) for request in requests
    ]
    differences = []
    for time in _sample_times(seconds):
        start, end = time - WINDOW_SECONDS / 2, time + WINDOW_SECONDS / 2
        got = {
            tenant: _service_between(tenant_pieces, start, end)
            for tenant, tenant_pieces in pieces.items()
        }
        wanted = dict.fromkeys(pieces, 0.0)
        for at, tenant, service in asked:
            if start <= at <= end:
                wanted[tenant] += service
        most = max(got.values())
        lacks = (min(most - got[t], abs(wanted[t] - got[t])) for t in pieces)
        differences.append(sum(lacks) / WINDOW_SECONDS)
    return differences


def first_token_percentile(requests: Iterable[SimulatedRequest], q: float) -> float:
    """The quantile `q` of the accepted requests' times to first token, in seconds.

    One that never had a first token counts as infinite; so does a run without accepted requests.
    """
    ttfts = [
        inf if request.ttft is None else request.ttft
        for request in requests
        if request.accepted is not None
    ]
    if not ttfts:
        return inf
    ttfts.sort()
    return ttfts[min(len(ttfts) - 1, ceil(q * len(ttfts)) - 1)]


def share(requests: Sequence[SimulatedRequest], holds: Callable[[SimulatedRequest], bool]) -> float:
    """The fraction of requests for which `holds` is true; 0 of none."""
    return sum(map(holds, requests)) / len(requests) if requests else 0.0


def tokens_per_second(outcome: Outcome) -> float:
    """Prompt and output tokens of completed requests over the whole run, its drain included."""
    total = sum(
        request.spec.prompt_tokens + request.spec.output_tokens
        for request in outcome.requests
        if request.completed
    )
    return total / outcome.ended


def worst_share_error(got: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The largest error of a tenant's share of the service, relative to its weight's share."""
    total, weight = sum(got[t] for t in weights), sum(weights.values())
    return max(abs(got[t] / total * weight / weights[t] - 1) for t in weights)
