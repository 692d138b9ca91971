"""B2 on a running system: nine calm tenants, and a loud one with all its requests at one gateway.

The nine's are spread over both gateways. First come, first served is the same load with all
requests in one tenant's name. Beside it stands what the simulator says of the same load.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from bench import results
from bench.live.plant import Shape, running, stepped
from bench.live.setting import GATEWAYS, PROCESSES, TRACES, WORKER, WORKERS, described, simulated
from bench.live.traffic import Sent, Traffic
from bench.results import Figure, Run
from bench.simulation import loads, measures, runs
from bench.simulation.isolation import ARENA, CAPACITY_ROWS, LOUD, QUIET, QUIET_SHARE, WEIGHTS
from bench.simulation.loads import Load
from bench.simulation.request import Asked, Fate
from bench.simulation.runs import Outcome, capacity
from bench.simulation.systems import Millstream, Plant
from dispatcher.fair_queue import service
from millstream.bench.statistics import percentile

BEFORE = 0.1  # of the time, in which the nine are alone
LEVEL_SECONDS = 30.0  # until shares are looked at: an empty fleet takes what there is, of anybody
DRAIN_SECONDS = 30.0
LOUD_SOCKETS = 64
ONE = "one"  # tenant of all, where requests are served as they come
STAGES = ("admit", "queue", "dispatch", "prefill")

FIGURES = (
    Figure("requests_per_second", "capacity of the workers, requests/s"),
    Figure("samples", "requests of the nine"),
    Figure("solo_p99_ms", "the nine alone: p99 to first token, ms"),
    Figure("p99_ms", "beside the loud one, ms"),
    Figure("over_solo", "that over solo", "≤ 1.5"),
    Figure("simulated_over_solo", "as simulated"),
    Figure("late_p99_ms", "sent later than they were due: p99, ms"),
    *(Figure(f"{stage}_p99_ms", f"{stage} of those that ended, p99, ms") for stage in STAGES),
    Figure("fcfs_p50_ms", "first come, first served: already p50, ms"),
    Figure("refused", "of the nine's refused", "0"),
    Figure("throughput", "throughput over that of first come, first served", "≥ 0.93"),
    *(Figure(f"cores_{name}", f"cores used by {name}") for name in PROCESSES),
)
SHARES = tuple(
    Figure(f"{key}_{count}", f"{count} gateways: {words}", goal)
    for count in (2, 4)
    for key, words, goal in (
        ("ratio", "service of weight 4 over that of weight 1", ""),
        ("error", "largest error of a share", "≤ 0.05"),
        ("simulated_error", "as simulated", ""),
    )
)


def measure(factor: float, seeds: int, seconds: float) -> None:
    """With a tenant so many times as loud as is fair; each seed on fresh systems."""
    found = [asyncio.run(_beside(factor, seed, seconds)) for seed in range(seeds)]
    results.publish(f"live-b2-{factor:g}", described(seconds), FIGURES, found)


def measure_weights(seeds: int, seconds: float) -> None:
    """Two tenants of weights 4 and 1, both backlogged, one of them at a gateway of its own."""
    if seconds <= LEVEL_SECONDS:
        raise SystemExit(f"shares are looked at after {LEVEL_SECONDS:g} s: give more --seconds")
    found = [asyncio.run(_weights(seed, seconds)) for seed in range(seeds)]
    results.publish("live-b2-weights", described(seconds), SHARES, found)


class Scene:
    """One seed's requests, of the lengths of Chatbot Arena's."""

    def __init__(self, seed: int, seconds: float) -> None:
        self._rows = loads.trace(TRACES / ARENA, loads.sized)
        self._random, self._seconds = Random(seed), seconds
        self.capacity = WORKERS * capacity(WORKER, tuple(self._rows[:CAPACITY_ROWS]))

    def of(self, tenant: str, share: float, gateways: Sequence[int]) -> list[Asked]:
        """Poisson arrivals at these gateways that would take this share of the capacity."""
        asked, random = Asked(0, tenant, 0, 0), self._random
        arrivals = loads.poisson(asked, share * self.capacity, self._seconds, random)
        sized = loads.resized(arrivals, self._rows, random)
        return [replace(each, gateway=random.choice(gateways)) for each in sized]

    def quiet(self) -> list[Asked]:
        share = QUIET_SHARE / len(QUIET)
        return loads.merged(*(self.of(tenant, share, range(GATEWAYS)) for tenant in QUIET))

    def loud(self, factor: float) -> list[Asked]:
        """After a while, all at the first gateway."""
        later = self._seconds * BEFORE
        asked = self.of(LOUD, factor / 10, [0])
        moved = (replace(each, at=each.at + later) for each in asked)
        return [each for each in moved if each.at < self._seconds]


async def _beside(factor: float, seed: int, seconds: float) -> Run:
    scene = Scene(seed, seconds)
    quiet = scene.quiet()
    alone = Load(quiet, seconds)
    load = Load(loads.merged(quiet, scene.loud(factor)), seconds, _is_quiet)
    solo, _ = await _live(alone)
    fcfs = await _first_come(load)
    outcome, traffic = await _live(load)
    calm = _of_quiet(outcome)
    modelled, modelled_solo = (simulated(each, DRAIN_SECONDS) for each in (load, alone))
    return {
        "requests_per_second": scene.capacity,
        "samples": len(calm),
        "solo_p99_ms": 1000 * _p99(solo.fates),
        "p99_ms": 1000 * _p99(calm),
        "over_solo": _p99(calm) / _p99(solo.fates),
        "simulated_over_solo": _p99(_of_quiet(modelled)) / _p99(modelled_solo.fates),
        **_stages([sent for sent in traffic.sent if _is_quiet(sent.asked)]),
        "fcfs_p50_ms": 1000 * measures.first_token_percentile(_of_quiet(fcfs), 0.5),
        "refused": sum(fate.refused for fate in calm),
        "throughput": outcome.served / fcfs.served,
        **{f"cores_{name}": traffic.cores[name] for name in PROCESSES},
    }


def _stages(sent: Sequence[Sent]) -> Run:
    """Where time was lost: before a request was sent, and in each stage of those that ended."""
    samples = [each.sample for each in sent]
    late = [1000 * (sample.sent - sample.due) for sample in samples]
    spent = {stage: [s.timing[stage] for s in samples if s.ok] for stage in STAGES}
    spent["late"] = late
    return {f"{name}_p99_ms": percentile(sorted(values), 0.99) for name, values in spent.items()}


async def _first_come(load: Load) -> Outcome:
    """One tenant's requests are served in the order in which they come."""
    asked = [replace(each, tenant=ONE) for each in load.asked]
    outcome, _ = await _live(Load(asked, load.seconds, lambda asked: False))
    for fate, own in zip(outcome.fates, load.asked, strict=True):
        fate.asked = own
    return outcome


async def _live(load: Load) -> tuple[Outcome, Traffic]:
    tenants = dict.fromkeys((*QUIET, LOUD, ONE), 1.0)
    shape = Shape(tenants, stepped(WORKER), WORKERS, GATEWAYS)
    async with running(shape) as plant:
        traffic = Traffic(plant, {LOUD: LOUD_SOCKETS, ONE: LOUD_SOCKETS})
        return await traffic.run(load, DRAIN_SECONDS), traffic


async def _weights(seed: int, seconds: float) -> Run:
    found: dict[str, float] = {}
    for count in (2, 4):
        scene = Scene(seed, seconds)
        asked = loads.merged(scene.of("four", 2.0, [0]), scene.of("one", 2.0, range(1, count)))
        load = Load(asked, seconds, lambda asked: False)
        shape = Shape(WEIGHTS, stepped(WORKER), WORKERS, count)
        async with running(shape) as plant:
            outcome = await Traffic(plant, dict.fromkeys(WEIGHTS, LOUD_SOCKETS)).run(load, 0.0)
        modelled = Plant((WORKER,) * WORKERS, count, WEIGHTS)
        expected = runs.Run(Millstream, modelled, load).run(0.0)
        got = shares(outcome, seconds)
        found |= {
            f"ratio_{count}": got["four"] / got["one"],
            f"error_{count}": measures.worst_share_error(got, WEIGHTS),
            f"simulated_error_{count}": measures.worst_share_error(
                shares(expected, seconds), WEIGHTS
            ),
        }
    return found


def shares(outcome: Outcome, seconds: float) -> dict[str, float]:
    """The service that each tenant saw once things were level.

    What has not ended counts, too: more of the tenant that gets less is under way.
    """
    generated = {fate.request_id: n for engine in outcome.engines for fate, n in engine.progress()}
    got = dict.fromkeys(WEIGHTS, 0.0)
    for fate in outcome.fates:
        tokens = generated.get(fate.request_id, fate.generated)
        got[fate.asked.tenant] += _seen(fate, tokens, seconds)
    return got


def _seen(fate: Fate, generated: int, seconds: float) -> float:
    """Of one request, spread evenly from its first token to its last."""
    if fate.first is None:
        return 0.0
    until = fate.ended or seconds
    spent = service(fate.asked.prompt_tokens, generated)
    return spent * max(0.0, until - max(LEVEL_SECONDS, fate.first)) / max(until - fate.first, 1e-6)


def _p99(fates: Sequence[Fate]) -> float:
    return measures.first_token_percentile(fates, 0.99)


def _of_quiet(outcome: Outcome) -> list[Fate]:
    return [fate for fate in outcome.fates if _is_quiet(fate.asked)]


def _is_quiet(asked: Asked) -> bool:
    return asked.tenant != LOUD
