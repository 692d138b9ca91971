"""The machines of one model: what is asked of it, what they carry, and what is to change. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from fleet.planner.demand_history import DemandHistory
from fleet.planner.fleet_decision import MachineEnd, MachineStart
from fleet.planner.fleet_state import PlannedModel
from fleet.planner.machine_phases import MachinePhase, PhasedMachine
from fleet.planner.model_view import ModelChanges, ModelView
from fleet.planner.planner_options import PlannerOptions
from fleet.planner.type_offers import TypeStock, choose_cheapest, choose_first

LOST_WORDS = {
    MachinePhase.OVERDUE: "its worker is not heard",
    MachinePhase.LOST: "its worker was never heard",
    MachinePhase.REFUSED: "it is not to be had",
    MachinePhase.TAKEN_BACK: "its provider takes it back",
}


@dataclass(frozen=True)
class _Need:
    """Tokens a second to be ready for, and those below which nothing goes; inf: nothing at all."""

    grow: float
    hold: float


class ModelPlanner:
    """Plans one model, and remembers what was asked of it and when last."""

    def __init__(self, options: PlannerOptions) -> None:
        self._options = options
        self._all = DemandHistory(options)
        self._off_spot = DemandHistory(options)
        self._active_at: float | None = None
        self._began_at: float | None = None

    def plan(self, view: ModelView, stock: TypeStock, now: float) -> ModelChanges:
        """Return what is to change; what is started is taken off `stock`."""
        changes = ModelChanges()
        model = view.model
        if self._began_at is None:
            self._began_at = now
        if self._active_at is None or not model.is_none_asked_for:
            self._active_at = now
        is_idle = now - self._active_at >= model.policy.idle_seconds
        counted = view.counted
        self._drop_lost(view, changes)
        free = self._apply_overrides(view, counted, stock, changes)
        ended = {each.machine for each in changes.ends}
        counted = [machine for machine in counted if machine.id not in ended]
        needs = self._needs(view, now)
        least = model.policy.least_workers(now + view.soonest)
        if not counted and not changes.starts and model.is_asked_for:
            self._wake(view, stock, changes, now)
        elif counted and not is_idle:
            self._grow(view, counted, needs, stock, changes)
        self._fill_up(view, counted, least, stock, changes)
        if not changes.starts:
            self._shrink(view, counted, free, needs, least, is_idle, changes)
        changes.reason = changes.reason or self._words(view, counted, needs[0], is_idle)
        return changes

    # Machines that are lost, and those that an operator wants

    def _drop_lost(self, view: ModelView, changes: ModelChanges) -> None:
        """End what does not come; while no worker is heard, what may be there stays."""
        for machine in view.machines:
            words = LOST_WORDS.get(machine.phase)
            is_unsure = machine.phase is MachinePhase.OVERDUE and not view.somebody_is_heard
            if words and not is_unsure:
                changes.ends.append(MachineEnd(machine.id, view.name, f"{machine.type}: {words}"))

    def _apply_overrides(
        self,
        view: ModelView,
        counted: Sequence[PhasedMachine],
        stock: TypeStock,
        changes: ModelChanges,
    ) -> list[PhasedMachine]:
        """Make as many machines as operators want; return those of the other types."""
        for override in view.overrides:
            reason = f"an operator wants {override.count} of {override.type}"
            there = sorted(
                (machine for machine in counted if machine.type == override.type),
                key=lambda machine: machine.created_at,
            )
            for machine in there[override.count :]:
                changes.ends.append(MachineEnd(machine.id, view.name, reason))
            is_open = override.type in view.open_types
            for _ in range(override.count - len(there) if is_open else 0):
                self._start(view, override.type, reason, stock, changes)
        set_types = {override.type for override in view.overrides}
        return [machine for machine in counted if machine.type not in set_types]

    def _started(self, view: ModelView, changes: ModelChanges) -> float:
        """Capacity of the machines that were started already; inf if one's is not known."""
        found = (view.capacities.get(start.type) for start in changes.starts)
        return sum(each.tokens_per_second if each else inf for each in found)

    # What is needed

    def _needs(self, view: ModelView, now: float) -> tuple[_Need, _Need]:
        """Return the need of all priorities, and that of those that are kept off spot machines."""
        off_spot = frozenset(view.model.policy.off_spot)
        return (
            self._need(view, self._all, view.model.demand.keys(), now),
            self._need(view, self._off_spot, off_spot & view.model.demand.keys(), now),
        )

    def _need(
        self, view: ModelView, history: DemandHistory, priorities: Collection[str], now: float
    ) -> _Need:
        told = [view.model.demand[priority] for priority in priorities]
        rates = [each.tokens_per_second for each in told]
        known = [rate for rate in rates if rate is not None]
        if len(known) == len(rates):
            history.observe(sum(known), now)
        waiting = sum(each.queued_tokens or 0.0 for each in told)
        need = history.forecast / self._options.utilisation + self._late(view, waiting)
        hold = history.hold(need, now)
        is_sure = len(known) == len(rates) and self._is_old(now)
        return _Need(need, hold if is_sure else inf)

    def _late(self, view: ModelView, waiting: float) -> float:
        """Tokens a second for what will still wait when a machine that is ordered now serves."""
        joined = [m for m in view.machines if m.phase is MachinePhase.JOINED]
        left = waiting - view.carried(joined) * view.soonest
        return max(0.0, left) / self._options.goal_seconds

    def _is_old(self, now: float) -> bool:
        """True once demand was seen for as long as capacity is held."""
        assert self._began_at is not None
        return now - self._began_at >= self._options.hold_seconds

    # Growth

    def _wake(self, view: ModelView, stock: TypeStock, changes: ModelChanges, now: float) -> None:
        """Start one machine: the cheapest that serves before the oldest deadline."""
        changes.is_woken = True
        offers = view.offers(stock.left, firm=self._is_off_spot_asked_for(view.model))
        deadline = view.model.oldest_deadline
        chosen = choose_first(offers, deadline, now)
        if chosen is None:
            changes.reason = f"{view.model.queued} requests wait, and no machine can be had"
            return
        seconds = "" if deadline is None else f" of {deadline - now:.0f} s"
        self._start(
            view,
            chosen.name,
            f"the model has no machine, and {view.model.queued} requests wait: {chosen.name} for "
            f"{chosen.kind.hour_price} an hour serves in {chosen.ready_seconds:.0f} s{seconds}",
            stock,
            changes,
        )

    def _is_off_spot_asked_for(self, model: PlannedModel) -> bool:
        """True if something waits or arrives that is to be kept off spot machines."""
        found = (model.demand.get(priority) for priority in model.policy.off_spot)
        return any(each and not each.is_none_asked_for for each in found)

    def _grow(
        self,
        view: ModelView,
        counted: Sequence[PhasedMachine],
        needs: tuple[_Need, _Need],
        stock: TypeStock,
        changes: ModelChanges,
    ) -> None:
        """Start what is missing: first for what is kept off spot machines, then for all."""
        firm = [machine for machine in counted if not view.is_spot(machine)]
        missing = needs[1].grow - view.carried(firm)
        self._buy(view, missing, needs[1].grow, stock, changes, firm=True)
        missing = needs[0].grow - view.carried(counted) - self._started(view, changes)
        self._buy(view, missing, needs[0].grow, stock, changes, firm=False)

    def _buy(
        self,
        view: ModelView,
        missing: float,
        need: float,
        stock: TypeStock,
        changes: ModelChanges,
        *,
        firm: bool,
    ) -> None:
        """Start machines for so many tokens a second, if any are missing."""
        if missing <= 0:
            return
        for offer in choose_cheapest(missing, view.offers(stock.left, firm=firm)):
            carried = offer.tokens_per_second if offer.capacity else inf
            source = offer.capacity.source if offer.capacity else "nobody knows yet what it carries"
            self._start(
                view,
                offer.name,
                f"{need:,.0f} tokens/s needed, {missing:,.0f} more than there is: {offer.name} for "
                f"{offer.kind.hour_price} an hour carries {carried:,.0f} ({source})",
                stock,
                changes,
            )

    def _fill_up(
        self,
        view: ModelView,
        counted: Sequence[PhasedMachine],
        least: int,
        stock: TypeStock,
        changes: ModelChanges,
    ) -> None:
        """Start the cheapest machines up to the least number of them."""
        for _ in range(least - len(counted) - len(changes.starts)):
            offer = choose_first(view.offers(stock.left, firm=False), None, 0.0)
            if offer is None:
                return
            self._start(view, offer.name, f"at least {least} machines are wanted", stock, changes)

    def _start(
        self, view: ModelView, type_name: str, reason: str, stock: TypeStock, changes: ModelChanges
    ) -> None:
        """Start a machine, unless the model may not have more."""
        most = view.model.policy.max_workers
        there = len(view.machines) - len(changes.ends) + len(changes.starts)
        if there >= most:
            changes.reason = f"{reason}; but at most {most} machines are allowed"
            return
        stock.take(type_name)
        changes.starts.append(MachineStart(type_name, view.name, reason))

    # Shrinking

    def _shrink(
        self,
        view: ModelView,
        counted: Sequence[PhasedMachine],
        free: Iterable[PhasedMachine],
        needs: tuple[_Need, _Need],
        least: int,
        is_idle: bool,
        changes: ModelChanges,
    ) -> None:
        """End what is not needed: slow machines first, then the dearest for what they carry."""
        slow = [machine for machine in view.machines if machine.phase is MachinePhase.SLOW]
        joined = [machine for machine in counted if machine.phase is MachinePhase.JOINED]
        kept = list(counted)
        for machine in [*slow, *sorted(free, key=lambda each: self._worth(view, each))]:
            others = [each for each in kept if each is not machine]
            serving = [each for each in joined if each is not machine]
            if len(others) < max(least, 0 if is_idle else 1):
                continue
            if is_idle:
                reason = f"nothing was asked of it for {view.model.policy.idle_seconds:.0f} s"
            elif self._is_enough(view, serving, needs):
                reason = (
                    f"{needs[0].hold:,.0f} tokens/s were needed of late, and the others carry "
                    f"{view.carried(serving):,.0f}"
                )
                if machine in slow:
                    reason = f"it does less than half of what its like does; {reason}"
            else:
                continue
            kept, joined = others, serving
            changes.ends.append(MachineEnd(machine.id, view.name, f"{machine.type}: {reason}"))

    def _is_enough(
        self, view: ModelView, machines: Sequence[PhasedMachine], needs: tuple[_Need, _Need]
    ) -> bool:
        if inf in (needs[0].hold, needs[1].hold):
            return False
        firm = [machine for machine in machines if not view.is_spot(machine)]
        return view.carried(machines) >= needs[0].hold and view.carried(firm) >= needs[1].hold

    def _worth(self, view: ModelView, machine: PhasedMachine) -> tuple[float, float]:
        """Order in which machines go: the least carried for the money, then the newest."""
        kind = view.types.get(machine.type)
        price = kind.price_per_hour if kind else 0
        carried = view.carried([machine])
        return (carried / price if price else inf), -machine.created_at

    # Words

    def _words(
        self, view: ModelView, counted: Sequence[PhasedMachine], need: _Need, is_idle: bool
    ) -> str:
        carried = view.carried(counted)
        if is_idle:
            return f"nothing was asked of it for {view.model.policy.idle_seconds:.0f} s"
        told = "what they carry is not known yet" if carried == inf else f"carry {carried:,.0f}"
        return f"{need.grow:,.0f} tokens/s needed; {len(counted)} machines: {told}"
