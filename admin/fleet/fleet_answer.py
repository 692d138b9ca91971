"""The fleet as the admin service tells of it, in JSON objects. Pure."""

from collections.abc import Mapping
from math import isinf
from typing import Any

from streams.records.fleet.fleet_orders import FleetOrders
from streams.records.fleet.fleet_plan import FleetPlan, WantedMachine
from streams.records.fleet.machine_list import MachineList
from streams.records.fleet.machine_types import MachineType

JsonBody = dict[str, Any]


def describe_fleet(
    known: MachineList,
    plan: FleetPlan,
    orders: FleetOrders,
    models: Mapping[str, object],
    now: float,
) -> JsonBody:
    """Return all that is known of the fleet at `now` (epoch seconds).

    `models` are those that are registered. Changes come the newest first.
    """
    wanted = plan.wanted_at(now)
    names = dict.fromkeys([*models, *plan.reasons])
    return {
        "paused_until": orders.paused_until if now < orders.paused_until else None,
        "types": [_describe_type(known, kind) for kind in known.types.values()],
        "models": [_describe_model(name, known, plan, orders, now) for name in names],
        "machines": [
            _describe_machine(name, known, wanted.get(name))
            for name in dict.fromkeys([*known.machines, *wanted])
        ],
        "changes": [vars(each) for each in reversed(plan.changes)],
    }


def _describe_model(
    name: str, known: MachineList, plan: FleetPlan, orders: FleetOrders, now: float
) -> JsonBody:
    """Return what is wanted for a model, why, and how long its wake takes, if it is woken."""
    policy, cold_start = known.policy_of(name), plan.cold_starts.get(name)
    return {
        "model": name,
        "wanted": sum(each.model == name for each in plan.wanted_at(now).values()),
        "min_workers": policy.min_workers,
        "max_workers": policy.max_workers,
        "idle_seconds": policy.idle_seconds,
        "reason": plan.reasons.get(name),
        "cold_start": cold_start and {**vars(cold_start), "seconds": cold_start.seconds},
        "orders": [vars(each) for each in orders.valid_at(now) if each.model == name],
    }


def _describe_type(known: MachineList, kind: MachineType) -> JsonBody:
    """Return a type with the price of an hour as text, and how many machines of it there are."""
    of_type = [each for each in known.machines.values() if each.type == kind.name]
    facts = {key: value for key, value in vars(kind).items() if key != "price_per_hour"}
    count = sum(each.state.exists for each in of_type)
    return {**facts, "price_per_hour": kind.hour_price, "machines": count}


def _describe_machine(name: str, known: MachineList, wanted: WantedMachine | None) -> JsonBody:
    """Return a machine as its provider knows it, or as `ordered` if it does not know of it yet."""
    facts: JsonBody = {"id": name, "state": "ordered", "created_at": None, "crashes": 0}
    if wanted:
        facts |= {"type": wanted.type, "model": wanted.model}
    if machine := known.machines.get(name):
        facts |= vars(machine)
    return {
        **facts,
        "reason": wanted.reason if wanted else "wanted no longer",
        "expires_at": None if wanted is None or isinf(wanted.expires_at) else wanted.expires_at,
    }
