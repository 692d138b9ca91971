"""Handlers of the operations on the fleet; they return JSON objects."""

import secrets
from collections.abc import Mapping

from admin.audit_trail import AuditTrail
from admin.fleet.fleet_override import FleetOverride
from admin.operation_table import FleetArguments, FleetPageArguments
from admin.operations import Handler, JsonBody
from registry.kv_view import RecordChange
from registry.store import Registry
from streams import subjects
from streams.broker.broker_client import Broker
from streams.errors import NotFound
from streams.records.fleet.fleet_plan import FleetPlan, WantedMachine
from streams.records.fleet.fleet_store import FleetStore
from streams.records.fleet.machine_list import MachineList, MachineState
from streams.records.fleet.machine_types import MachineType

_ID_BYTES = 4


class FleetOperations:
    """The operations on the fleet; they raise `NotFound` where there is none.

    Machines are wanted once the plan is stored; the provider starts them after that.
    """

    def __init__(self, broker: Broker, registry: Registry, trail: AuditTrail) -> None:
        self._broker, self._registry, self._trail = broker, registry, trail
        self._store = FleetStore(broker)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The coroutine function of each operation in the table, by its name."""
        return {"fleet.show": self._show, "fleet.set": self._set}

    async def _show(self, _: FleetPageArguments) -> JsonBody:
        known, plan = await self._read_machines(), await self._store.read_plan()
        wanted = plan.wanted_at(self._broker.clock.now())
        return {
            "types": [_describe_type(known, kind) for kind in known.types.values()],
            "machines": [
                _describe_machine(name, known, wanted.get(name))
                for name in dict.fromkeys([*known.machines, *wanted])
            ],
        }

    async def _set(self, arguments: FleetArguments) -> JsonBody:
        known = await self._read_machines()
        if arguments.name not in known.types:
            there_are = ", ".join(known.types)
            raise NotFound(f"there is no machine type {arguments.name!r}; there are: {there_are}")
        if arguments.model not in self._registry.models:
            raise self._registry.not_found(arguments.model)
        now = self._broker.clock.now()
        expires_at = now + arguments.seconds
        wanted = WantedMachine(arguments.name, arguments.model, "set by an operator", expires_at)
        change = await self._describe_change(wanted, arguments.count, now)
        async with self._trail.record(change):
            plan = await self._store_wanted(known, wanted, arguments.count, now)
        return {
            "type": wanted.type,
            "model": wanted.model,
            "expires_at": expires_at,
            "machines": [k for k, v in plan.machines.items() if v == wanted],
        }

    async def _store_wanted(
        self, known: MachineList, wanted: WantedMachine, count: int, now: float
    ) -> FleetPlan:
        new_ids = [f"m-{secrets.token_hex(_ID_BYTES)}" for _ in range(count)]
        ended = known.in_state(MachineState.RECLAIMING, MachineState.RECLAIMED)
        return await self._store.change_plan(
            lambda plan: plan.with_machines(wanted, new_ids, ended, now)
        )

    async def _describe_change(
        self, wanted: WantedMachine, count: int, now: float
    ) -> RecordChange[FleetOverride]:
        """Return the change for the audit log, with what was wanted before of type and model."""
        plan = await self._store.read_plan()
        before = [
            each for each in plan.wanted_at(now).values() if each.is_for(wanted.type, wanted.model)
        ]
        past = before and _override(before[0], len(before))
        return RecordChange(subjects.FLEET_PLAN, past or None, _override(wanted, count))

    async def _read_machines(self) -> MachineList:
        """Return the provider's list; raises `NotFound` if there is no provider."""
        known = await self._store.read_machines()
        if not known.types:
            raise NotFound(
                "there is no fleet: workers are not started by a plan here; start `millstream up` "
                "with a table [fleet.types.NAME] in its configuration file"
            )
        return known


def _override(wanted: WantedMachine, count: int) -> FleetOverride:
    return FleetOverride(
        type=wanted.type, model=wanted.model, count=count, expires_at=wanted.expires_at
    )


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
        "expires_at": wanted.expires_at if wanted else None,
    }
