"""The command `millstream plan`: how many workers of which type a rate of requests needs."""

import asyncio
import json
from collections.abc import Mapping

from millstream.admin.admin_client import AdminClient, AdminRefused, JsonBody, admin_client
from millstream.admin.console_output import NOT_FOUND, make_console
from millstream.admin.fitted_table import Column, FittedTable
from millstream.curves.capacity_plan import (
    CapacityPlan,
    Demand,
    Forecast,
    HourCost,
    cheapest_first,
    make_plan,
)
from millstream.curves.commands import fetch_curves
from millstream.curves.plan_settings import PlanSettings
from streams.errors import MillstreamError, NotFound
from streams.records.fleet.curves import Curve
from streams.records.fleet.step_times import RequestShape

_COLUMNS = (
    Column("type", "name"),
    Column("workers", is_number=True),
    Column("utilisation", is_number=True),
    Column("first token", is_number=True),
    Column("each token", is_number=True),
    Column("goals"),
    Column("cost/h", is_number=True),
    Column("cost/M tokens", is_number=True),
)


class NoCurve(NotFound):
    """The model has no curve: nobody has measured it, and no worker has run it for a minute."""


class GoalsOutOfReach(MillstreamError):
    """No machine type keeps the goals, even with a single request at once."""


async def run(settings: PlanSettings, stop: asyncio.Event) -> int:
    """Print the plan; return the exit status: 1 if it does not keep the goals, else 0.

    Raises `NoCurve`, `GoalsOutOfReach`, `PlanTooLarge`, or as `AdminClient.call`.
    """
    async with admin_client(settings) as admin:
        model = await admin.call("models.show", name=settings.model)
        curves = await fetch_curves(admin)
        costs = await _fetch_costs(admin)
    name, version = model["model"]["name"], model["version"]
    found = [each for each in curves if (each.model, each.version) == (name, version)]
    plans = _make_plans(settings, f"{name}@{version}", found, costs)
    if settings.as_json:
        best, *others = map(_to_json, plans)
        print(json.dumps({**best, "alternatives": others}))
    else:
        _print(plans)
    return 0 if plans[0].planned.keeps_goals else NOT_FOUND


async def _fetch_costs(admin: AdminClient) -> dict[str, HourCost]:
    """Return what an hour of each machine type costs; none where there is no fleet."""
    try:
        types = (await admin.call("fleet.show"))["types"]
    except AdminRefused as refusal:
        if refusal.code != NotFound.code:
            raise
        return {}
    return {t["name"]: HourCost(float(t["price_per_hour"]), t["currency"]) for t in types}


def _make_plans(
    settings: PlanSettings, model: str, curves: list[Curve], costs: Mapping[str, HourCost]
) -> list[CapacityPlan]:
    """Return the plans for the types that were asked for, the best first."""
    wanted = [each for each in curves if settings.type in (None, each.type)]
    if not wanted:
        there_are = ", ".join(each.type for each in curves) or "none"
        of_type = f" on the type {settings.type!r}" if settings.type else ""
        raise NoCurve(
            f"there is no curve of {model}{of_type} (types with one: {there_are}): measure a "
            f"running worker with `millstream bench --curve --model {model}`"
        )
    shape = RequestShape(settings.prompt, settings.output)
    demand = Demand(settings.rate, shape, settings.goals, settings.utilisation)
    plans = (make_plan(curve, demand, costs.get(curve.type)) for curve in wanted)
    found = list(cheapest_first([plan for plan in plans if plan]))
    if not found:
        names = ", ".join(each.name for each in wanted)
        raise GoalsOutOfReach(
            f"not one request of {shape.prompt_tokens:g} and {shape.output_tokens:g} tokens keeps "
            f"the goals, or fits, on {names}: {_describe_single(wanted, shape)}"
        )
    return found


def _describe_single(curves: list[Curve], shape: RequestShape) -> str:
    """A single request as it would be on the type that is first with its first token."""
    alone = min(
        (each.capacity_at(1, shape) for each in curves), key=lambda c: c.first_token_seconds
    )
    return (
        f"alone it takes {alone.first_token_seconds:.3g} s to the first token and "
        f"{alone.token_seconds:.3g} s to each next"
    )


def _to_json(plan: CapacityPlan) -> JsonBody:
    curve, capacity = plan.curve, plan.capacity
    return {
        "type": curve.type,
        "model": curve.model,
        "version": curve.version,
        **vars(plan.planned),
        "currency": plan.currency,
        "formula": plan.formula,
        "requests_per_second": plan.demand.requests_per_second,
        "batch": capacity.batch,
        "request_seconds": capacity.request_seconds,
        "requests_per_second_of_a_worker": capacity.requests_per_second,
        "one_fewer": plan.one_fewer and vars(plan.one_fewer),
        "one_more": vars(plan.one_more),
        "curve": {
            "source": curve.source,
            "measured_at": curve.measured_at,
            "live_factor": curve.live_factor,
        },
    }


def _print(plans: list[CapacityPlan]) -> None:
    best, console = plans[0], make_console()
    console.print(f"{best.planned.workers:,} of {best.curve.type}: {best.formula}")
    console.print(
        "(rate x seconds of a request / requests at once on a worker / utilisation; the curve is "
        f"from {best.curve.source})"
    )
    around = [each for each in (best.one_fewer, best.planned, best.one_more) if each]
    console.print(FittedTable(_COLUMNS, [_cells(best, each) for each in around]))
    if len(plans) > 1:
        rows = [_cells(plan, plan.planned) for plan in plans[1:]]
        console.print(FittedTable(_COLUMNS, rows, "Other types"))


def _cells(plan: CapacityPlan, forecast: Forecast) -> list[str]:
    return [
        plan.curve.type,
        f"{forecast.workers:,}",
        f"{forecast.utilisation:.0%}",
        _milliseconds(forecast.first_token_seconds),
        _milliseconds(forecast.token_seconds),
        "kept" if forecast.keeps_goals else "missed",
        _money(forecast.cost_per_hour, plan.currency),
        _money(forecast.cost_per_million_tokens, plan.currency),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "without end" if seconds is None else f"{1000 * seconds:,.1f} ms"


def _money(amount: float | None, currency: str | None) -> str:
    return "unknown" if amount is None else f"{amount:,.4f} {currency}"
