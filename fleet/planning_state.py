"""The state by which the planner decides, from signals, records and what workers say. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fleet.planner.fleet_state import (
    FleetState,
    HeardWorker,
    MachineCapacity,
    PlannedModel,
    PriorityDemand,
)
from fleet.planner.planner_options import PlannerOptions
from fleet.signals.arrival_rates import AcceptedRate
from fleet.signals.signal_report import ModelSignals, PrioritySignals, SignalReport
from fleet.signals.signal_window import SignalWindow
from registry.models import Model
from streams.messages import Heartbeat, Pressure
from streams.records.fleet.curves import Curve
from streams.records.fleet.fleet_orders import FleetOrders
from streams.records.fleet.fleet_plan import FleetPlan
from streams.records.fleet.machine_list import MachineList, MachineState
from streams.records.fleet.step_times import CapacityGoals, RequestShape
from streams.subjects import Priority

_PRIORITIES = frozenset(map(str, Priority))


def build_state(
    known: MachineList,
    plan: FleetPlan,
    orders: FleetOrders,
    window: SignalWindow,
    report: SignalReport,
    models: Mapping[str, Model],
    curves: Mapping[str, Curve],
) -> FleetState:
    """Return the fleet as it is known now.

    `models` are those that are registered, by name, and `curves` what is known of machine types, by
    `TYPE/MODEL@VERSION`.
    """
    signals = {each.model: each for each in report.models}
    beats = window.heartbeats()
    heard = [beat for beat, _ in beats]
    return FleetState(
        types=known.types,
        models={
            name: replace(
                _planned_model(model, known, signals.get(name), window, heard),
                **_measured(model, known, plan, signals.get(name), curves),
            )
            for name, model in models.items()
        },
        wanted=plan.wanted_at(report.at),
        machines=known.machines,
        workers={
            beat.worker: HeardWorker(at, beat.running, beat.max_sequences, beat.tokens_per_second)
            for beat, at in beats
        },
        overrides=orders.valid_at(report.at),
        budget_per_hour=known.budget_per_hour,
        is_paused=report.at < orders.paused_until,
    )


def _planned_model(
    model: Model,
    known: MachineList,
    signals: ModelSignals | None,
    window: SignalWindow,
    beats: list[Heartbeat],
) -> PlannedModel:
    name = model.name
    return PlannedModel(
        policy=known.policy_of(name),
        demand={
            each.priority: _demand(
                each, window.recent_rate(name, each.priority), window.pressure(name)
            )
            for each in (signals.priorities if signals else ())
            if each.priority in _PRIORITIES
        },
        running=_count_running(name, known, beats),
        output_share=_output_share(window.recent_rate(name, each) for each in _PRIORITIES),
    )


def _measured(
    model: Model,
    known: MachineList,
    plan: FleetPlan,
    signals: ModelSignals | None,
    curves: Mapping[str, Curve],
) -> dict[str, Any]:
    """Measured facts of a model, as fields of `PlannedModel`; loads by machines' lives first.

    A curve that live workers alone have shown counts for nothing here: it does not say what a
    machine carries that has had little to do.
    """
    name, shape = f"{model.name}@{model.default_version}", mean_shape(signals) if signals else None
    found = {kind: curves.get(f"{kind}/{name}") for kind in known.types}
    measured = {kind: curve for kind, curve in found.items() if curve and curve.points}
    loads = {kind: each.load_seconds for kind, each in measured.items()}
    weights = [each.weight_bytes for each in measured.values() if each.weight_bytes]
    return {
        "capacities": _capacities(measured, shape, _strictest_goals(model)),
        "load_seconds": {kind: each for kind, each in loads.items() if each is not None}
        | dict(plan.load_seconds.get(model.name, {})),
        "memory": min(weights, default=None),
    }


def _strictest_goals(model: Model) -> CapacityGoals:
    """The shortest time to the first token that is a goal of the model at any priority."""
    told = [each.time_to_first_token_ms for each in model.goals.values()]
    goals = [each / 1000 for each in told if each is not None]
    return CapacityGoals(min(goals, default=PlannerOptions.goal_seconds))


def _capacities(
    curves: Mapping[str, Curve], shape: RequestShape | None, goals: CapacityGoals
) -> dict[str, MachineCapacity]:
    """Capacities of machine types for requests as they are now.

    Before any request has ended, they are taken to be like those of the curve's first point. Where
    not even one keeps the goals, a machine carries what it can: it is better than none.
    """
    found = dict[str, MachineCapacity]()
    for kind, curve in curves.items():
        if wanted := shape or curve.usual_shape:
            capacity = curve.capacity(wanted, goals) or curve.capacity(wanted, CapacityGoals())
            carried = capacity.requests_per_second * wanted.tokens if capacity else 0.0
            found[kind] = MachineCapacity(carried, curve.source.value)
    return found


def mean_shape(signals: ModelSignals) -> RequestShape | None:
    """Return the mean tokens of the requests of a model that have ended; None if none has."""
    ended = sum(sum(each.ended.values()) for each in signals.priorities)
    output = sum(each.completion_tokens for each in signals.priorities)
    if not ended or not output:
        return None
    return RequestShape(
        sum(each.prompt_tokens for each in signals.priorities) / ended, output / ended
    )


def _demand(
    signals: PrioritySignals, rate: AcceptedRate | None, pressure: Pressure | None
) -> PriorityDemand:
    queued, deadline = signals.queued, pressure.earliest_deadline if pressure else 0
    return PriorityDemand(
        accepted_tokens_per_second=rate.prompt_tokens + rate.output_tokens if rate else None,
        refused_tokens_per_second=signals.refused_tokens_per_second,
        queued=queued,
        queued_tokens=pressure.queued_tokens.get(signals.priority) if pressure else None,
        oldest_deadline=deadline / 1000 if queued and deadline else None,
    )


def _output_share(rates: Iterable[AcceptedRate | None]) -> float | None:
    """The share of what arrives that is generated; None while nothing is known to arrive."""
    known = [rate for rate in rates if rate]
    output = sum(rate.output_tokens for rate in known)
    total = output + sum(rate.prompt_tokens for rate in known)
    return output / total if total else None


def _count_running(name: str, known: MachineList, beats: list[Heartbeat]) -> int | None:
    """Requests that run on a model's workers; None while a machine of it that runs is not heard."""
    heard = {beat.worker for beat in beats}
    running = known.in_state(MachineState.RUNNING)
    if any(known.machines[each].model == name and each not in heard for each in running):
        return None
    return sum(beat.running + beat.waiting for beat in beats if beat.model == name)
