"""What the figures are made of: service over time, times to first token, what was on time.

The two measures of fairness are those of VTC's artifact (github.com/Ying1123/VTC-artifact,
`fair_bench/plot/visualize.py`): a request's service, prompt + 2 * output tokens, is spread evenly
from its first token to its last, and looked at 100 times while requests come in.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, inf

from bench.simulation.runs import Outcome
from dispatcher.queueing.fair_queue import service_tokens
from simulation.request import RequestSpec, SimulatedRequest

LOOKS = 100
WINDOW_SECONDS = 60.0

Piece = tuple[float, float, float]  # from, to, service


def service_of(asked: RequestSpec) -> int:
    """Virtual tokens that a request takes when it runs to its end."""
    return service_tokens(asked.prompt_tokens, asked.output_tokens)


def _pieces(fates: Iterable[SimulatedRequest]) -> dict[str, list[Piece]]:
    """The service of completed requests, by tenant."""
    pieces: dict[str, list[Piece]] = {}
    for fate in fates:
        own = pieces.setdefault(fate.spec.tenant, [])
        if fate.completed and fate.first is not None and fate.ended is not None:
            own.append((fate.first, fate.ended, service_of(fate.spec)))
    return pieces


def _within(pieces: Iterable[Piece], start: float, end: float) -> float:
    return sum(
        service * max(0.0, min(end, until) - max(start, since)) / max(until - since, 1e-6)
        for since, until, service in pieces
    )


def _looks(seconds: float) -> list[float]:
    return [seconds * number / LOOKS for number in range(LOOKS)]


def service_by_tenant(
    fates: Iterable[SimulatedRequest], start: float, end: float
) -> dict[str, float]:
    """Virtual tokens that each tenant got between two times."""
    return {tenant: _within(own, start, end) for tenant, own in _pieces(fates).items()}


def accumulated_gap(fates: Sequence[SimulatedRequest], seconds: float) -> float:
    """The largest difference between two tenants' service since the start, at any time."""
    pieces = _pieces(fates).values()
    worst = 0.0
    for look in _looks(seconds):
        got = [_within(own, 0.0, look) for own in pieces]
        worst = max(worst, max(got) - min(got))
    return worst


def service_differences(fates: Sequence[SimulatedRequest], seconds: float) -> list[float]:
    """Per look, the sum over tenants of how much less they got per second than they might have.

    Within a window around the look: the most that any tenant got less their own service, but at
    most by how much that differs from what they asked for.
    """
    pieces = _pieces(fates)
    asked = [(fate.spec.at, fate.spec.tenant, service_of(fate.spec)) for fate in fates]
    differences = []
    for look in _looks(seconds):
        start, end = look - WINDOW_SECONDS / 2, look + WINDOW_SECONDS / 2
        got = {tenant: _within(own, start, end) for tenant, own in pieces.items()}
        wanted = dict.fromkeys(pieces, 0.0)
        for at, tenant, service in asked:
            if start <= at <= end:
                wanted[tenant] += service
        most = max(got.values())
        lacks = (min(most - got[t], abs(wanted[t] - got[t])) for t in pieces)
        differences.append(sum(lacks) / WINDOW_SECONDS)
    return differences


def first_token_percentile(fates: Iterable[SimulatedRequest], q: float) -> float:
    """Of the accepted; one that never had a first token waited for ever."""
    ttfts = [inf if fate.ttft is None else fate.ttft for fate in fates if fate.accepted is not None]
    if not ttfts:
        return inf
    ttfts.sort()
    return ttfts[min(len(ttfts) - 1, ceil(q * len(ttfts)) - 1)]


def share(fates: Sequence[SimulatedRequest], of: Callable[[SimulatedRequest], bool]) -> float:
    """The share of requests for which `of` holds; 0 of none."""
    return sum(map(of, fates)) / len(fates) if fates else 0.0


def tokens_per_second(outcome: Outcome) -> float:
    """Prompt and output tokens of completed requests over the whole run, its drain included."""
    whole = sum(
        fate.spec.prompt_tokens + fate.spec.output_tokens
        for fate in outcome.fates
        if fate.completed
    )
    return whole / outcome.ended


def worst_share_error(got: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """How far the tenants' service is from their weights, at most, as a share of the weight's."""
    whole, weight = sum(got[t] for t in weights), sum(weights.values())
    return max(abs(got[t] / whole * weight / weights[t] - 1) for t in weights)
