"""Keeps the fleet's plan while this process leads: decides, stores, and tells of wakes."""

import asyncio
import secrets
from contextlib import AsyncExitStack
from dataclasses import replace

import structlog
from nats.aio.msg import Msg

from fleet import model_wakes
from fleet.load_times import LoadTimes
from fleet.metrics import MACHINES, PLAN_CHANGES
from fleet.plan_step import apply_decision
from fleet.planner.planner import Planner
from fleet.planning_state import build_state
from fleet.signal_collector import SignalCollector
from registry.store import Registry
from streams import subjects
from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import BrokerUnavailable, StorageFull
from streams.messages import Heartbeat, Pressure
from streams.records.cas.cas_records import RecordChanged
from streams.records.fleet.curve_store import CurveStore
from streams.records.fleet.curves import Curve
from streams.records.fleet.fleet_orders import FleetOrders
from streams.records.fleet.fleet_plan import FleetPlan
from streams.records.fleet.fleet_store import FleetStore
from streams.records.fleet.machine_list import MachineList

log = structlog.get_logger()

TURN_SECONDS = 1.0  # between two decisions, if nothing happens
REASONS_SECONDS = 10.0  # after which reasons alone are stored anew: their numbers change always
CURVES_SECONDS = 10.0  # after which curves are read again
_ID_BYTES = 4


class PlanKeeper:
    """The plan of one leader, which alone writes it, by compare-and-set.

    A new id is in the stored plan before any provider sees it, so a leader that is killed buys
    nothing twice: its successor begins with what is stored.
    """

    def __init__(self, broker: Broker, registry: Registry, collector: SignalCollector) -> None:
        self._broker, self._registry, self._collector = broker, registry, collector
        self._store, self._planner = FleetStore(broker), Planner()
        self._curve_store = CurveStore(broker)
        self._curves: dict[str, Curve] = {}
        self._curves_read_at = 0.0
        self._plan: FleetPlan | None = None  # None: to be read again
        self._loads = LoadTimes({}, broker.clock.now())
        self._served: set[str] = set()  # models with a worker, by the last load reports
        self._stored_at = 0.0
        self._woken = asyncio.Event()
        collector.on_heard = self._on_heard

    async def run(self) -> None:
        """Decide once a second, and at once when a model without workers is asked for.

        Until cancelled; raises `BrokerUnavailable` while it starts. Later, what the broker refuses
        or does not answer is logged once, and decided anew.
        """
        trouble = ""
        async with AsyncExitStack() as stack:
            for changed in (subjects.FLEET_MACHINES_CHANGED, subjects.FLEET_ORDERS_CHANGED):
                subscription = await self._broker.subscribe(changed, self._on_change)
                stack.push_async_callback(subscription.unsubscribe)
            stack.callback(_clear_metrics)
            await self._collector.collected.wait()
            while True:
                self._woken.clear()
                try:
                    await self._turn()
                    trouble = ""
                except (BrokerUnavailable, StoreRefused, StorageFull, RecordChanged) as error:
                    self._plan = None
                    if trouble != (trouble := str(error)):
                        log.warning("plan_not_stored", reason=trouble or "another has stored one")
                await self._wait()

    async def _turn(self) -> None:
        if self._plan is None:
            self._plan = await self._store.read_plan()
            self._loads = LoadTimes(self._plan.load_seconds, self._broker.clock.now())
        known, orders = await self._store.read_machines(), await self._store.read_orders()
        MACHINES.known = known
        if known.types:
            self._plan = await self._decide(self._plan, known, orders)
            await self._tell_wakes(self._plan, known)

    async def _decide(self, plan: FleetPlan, known: MachineList, orders: FleetOrders) -> FleetPlan:
        """Return the plan as it holds: stored anew if a decision or a measurement changes it."""
        report, models = self._collector.measure(), self._registry.models
        for name, seconds in self._loads.measure(known.machines).items():
            machine = known.machines[name]
            log.info("model_loaded", machine=name, model=machine.model, seconds=round(seconds, 3))
        window, curves = self._collector.window, await self._read_curves(report.at)
        state = build_state(known, plan, orders, window, report, models, curves)
        decision = self._planner.decide(state, report.at)
        loads = {name: dict(each) for name, each in self._loads.by_model.items()}
        woken = {} if state.is_paused else model_wakes.find_cold_starts(models, known, loads)
        changed = replace(
            apply_decision(plan, decision, _new_id, report.at),
            cold_starts=woken,
            load_seconds=loads,
        )
        if not self._is_worth_storing(plan, changed, report.at):
            return plan
        stored = await self._store.write_plan(changed)
        self._stored_at = report.at
        _log_changes(plan, stored)
        return stored

    async def _read_curves(self, now: float) -> dict[str, Curve]:
        """Return the curves as they were at most `CURVES_SECONDS` ago."""
        if now - self._curves_read_at >= CURVES_SECONDS:
            self._curves, self._curves_read_at = await self._curve_store.read_all(), now
        return self._curves

    def _is_worth_storing(self, plan: FleetPlan, changed: FleetPlan, now: float) -> bool:
        if replace(changed, reasons=plan.reasons) != plan:
            return True
        return changed.reasons != plan.reasons and now - self._stored_at >= REASONS_SECONDS

    async def _tell_wakes(self, plan: FleetPlan, known: MachineList) -> None:
        now = self._broker.clock.now()
        for waking in model_wakes.find_wakes(plan, known, self._served, now):
            await self._broker.publish(subjects.waking(waking.model), waking.pack())

    def _on_heard(self, heard: Pressure | Heartbeat) -> None:
        """Note which models have workers; decide at once if one without is asked for."""
        if isinstance(heard, Heartbeat):
            is_ours = self._plan is not None and heard.worker in self._plan.machines
            if is_ours and not self._loads.has_joined(heard.worker):
                self._loads.note_heartbeat(heard, self._broker.clock.now())
                self._woken.set()
        elif heard.workers:
            self._served.add(heard.model)
        else:
            self._served.discard(heard.model)
            if any(heard.queued.values()) and not self._is_coming(heard.model):
                self._woken.set()

    def _is_coming(self, model: str) -> bool:
        wanted = self._plan.machines.values() if self._plan else ()
        return any(each.model == model for each in wanted)

    async def _on_change(self, _: Msg) -> None:
        self._woken.set()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._woken.wait()
        except TimeoutError:
            return


def _clear_metrics() -> None:
    MACHINES.known = None


def _new_id() -> str:
    return f"m-{secrets.token_hex(_ID_BYTES)}"


def _log_changes(before: FleetPlan, after: FleetPlan) -> None:
    known = {(each.at, each.machine) for each in before.changes}
    for each in after.changes:
        if (each.at, each.machine) not in known:
            PLAN_CHANGES.labels(each.action).inc()
            log.info("plan_changed", **{k: v for k, v in vars(each).items() if k != "at"})
