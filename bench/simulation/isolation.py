"""B2: one tenant asks for far more than its share; the other nine should not feel it."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from bench.simulation import loads, measures
from bench.simulation.baselines import Fcfs, Vtc
from bench.simulation.loads import Load
from bench.simulation.request import Asked, Fate
from bench.simulation.runs import Outcome, Run
from bench.simulation.scenario import Figure, Scenario, Setting, Values
from bench.simulation.systems import Build, Millstream, Plant, behind

SECONDS = 600.0
DRAIN_SECONDS = 3600.0
PROMPT, OUTPUT = 256, 256
QUIET_SHARE = 0.26  # of the capacity, the nine together
QUIET = tuple(f"q{number}" for number in range(9))
LOUD = "loud"
LONG_PROMPT = 32_768
SYSTEMS: dict[str, Build] = {"millstream": Millstream, "fcfs": behind(Fcfs), "vtc": behind(Vtc)}
Loud = Callable[[float, Random], list[Asked]]  # by the rate that is the worker's capacity


def _quiet(capacity: float, random: Random) -> list[list[Asked]]:
    rate = QUIET_SHARE * capacity / len(QUIET)
    return [
        list(
            loads.poisson(
                Asked(0, tenant, PROMPT, OUTPUT),
                rate,
                SECONDS,
                random,
            )
        )
        for tenant in QUIET
    ]


def _times(factor: float) -> Loud:
    """So many times its fair share, a tenth of the capacity."""

    def ask(capacity: float, random: Random) -> list[Asked]:
        asked = Asked(0, LOUD, PROMPT, OUTPUT)
        return list(loads.poisson(asked, factor * capacity / 10, SECONDS, random))

    return ask


def _long(capacity: float, random: Random) -> list[Asked]:
    """Ten times its share of the tokens, in prompts of 32k."""
    asked = Asked(0, LOUD, LONG_PROMPT, OUTPUT)
    rate = capacity * (PROMPT + 2 * OUTPUT) / asked.service
    return list(loads.poisson(asked, rate, SECONDS, random))


def _connected(capacity: float, random: Random) -> list[Asked]:
    """A thousand connections, each of which asks again at once."""
    asked = Asked(0, LOUD, PROMPT, OUTPUT, repeats=True)
    return list(loads.steady(asked, 1000.0, 1.0))


def _measure(loud: Loud, context: int = 0) -> Callable[[Setting, int], Values]:
    def measure(setting: Setting, seed: int) -> Values:
        worker = setting.worker
        if context > worker.kv_tokens:
            worker = replace(worker, kv_tokens=context)
        plant = Plant((worker,))
        capacity = worker.requests_per_second(PROMPT, OUTPUT)
        quiet = _quiet(capacity, Random(seed))
        alone = Load(loads.merged(*quiet), SECONDS)
        load = Load(loads.merged(*quiet, loud(capacity, Random(seed + 1000))), SECONDS, _is_quiet)
        solo = _run(Millstream, plant, alone)
        outcomes = {name: _run(build, plant, load) for name, build in SYSTEMS.items()}
        best = max(_throughput(outcome) for outcome in outcomes.values())
        values = {name: _values(outcome, solo, best) for name, outcome in outcomes.items()}
        return {"solo": {"p99": _p99(solo)}} | values

    return measure


def _run(build: Build, plant: Plant, load: Load) -> Outcome:
    return Run(build, plant, load).run(DRAIN_SECONDS)


def _values(outcome: Outcome, solo: Outcome, best: float) -> dict[str, float]:
    return {
        "p99": _p99(outcome),
        "over_solo": _p99(outcome) / _p99(solo),
        "refused": sum(fate.refused for fate in _of_quiet(outcome)),
        "throughput": _throughput(outcome) / best,
    }


def _p99(outcome: Outcome) -> float:
    return measures.first_token_percentile(_of_quiet(outcome), 0.99)


def _of_quiet(outcome: Outcome) -> list[Fate]:
    return [fate for fate in outcome.fates if _is_quiet(fate.asked)]


def _is_quiet(asked: Asked) -> bool:
    return asked.tenant != LOUD


def _throughput(outcome: Outcome) -> float:
    """Virtual tokens per second while requests came in."""
    return measures.service_per_second(outcome, 0.0, SECONDS)


FIGURES = (
    Figure("p99", "the nine's p99 to first token, s", known="FCFS 185; VTC 9.4; solo 0.46"),
    Figure("over_solo", "that over solo", 1.5),
    Figure("refused", "of the nine's refused", 0),
    Figure("throughput", "throughput, of the best's", 0.93, "higher"),
)
SCENARIOS = (
    Scenario("b2-10", "B2: one tenant at 10 times its share", FIGURES, _measure(_times(10))),
    Scenario("b2-100", "B2: one tenant at 100 times its share", FIGURES, _measure(_times(100))),
    Scenario(
        "b2-long", "B2: one tenant with prompts of 32k", FIGURES, _measure(_long, 3 * LONG_PROMPT)
    ),
    Scenario("b2-1000", "B2: one tenant on 1,000 connections", FIGURES, _measure(_connected)),
)
