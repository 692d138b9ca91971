"""Starts and ends workers as the fleet's plan wants them: the provider `process`."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import structlog

from millstream.up.child_process import ChildProcess
from millstream.up.machines import machine_life
from millstream.up.machines.machine_files import MachineFiles
from millstream.up.process_manager import ProcessManager
from streams import subjects
from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import BrokerUnavailable, StorageFull
from streams.records.cas.cas_records import RecordChanged
from streams.records.fleet.fleet_plan import FleetPlan
from streams.records.fleet.fleet_store import FleetStore
from streams.records.fleet.machine_list import MachineList, MachineState

log = structlog.get_logger()

LOOK_SECONDS = 1.0  # after which the plan is read again, if nobody has told of a change
_SERVICE = "worker"


class ProcessProvider:
    """The machines of one `millstream up`: each is a worker process on this computer.

    The list in the bucket `fleet` is written before anything is started or ended. A worker that
    dies is started again; `announce` tells of the death. That an ended machine's worker had to be
    killed counts as a death, too; that it has drained does not.
    """

    def __init__(
        self,
        broker: Broker,
        manager: ProcessManager,
        announce: Callable[[str], Awaitable[None]],
    ) -> None:
        self._broker, self._manager, self._announce = broker, manager, announce
        self._store = FleetStore(broker)
        self._files = MachineFiles(manager.directory.logs, manager.plan.accounts.users)
        self._known, self._plan = MachineList(), FleetPlan()
        self._workers: dict[str, ChildProcess] = {}
        self._ending: set[str] = set()
        # Left by callbacks for the next turn: machines whose workers have ended, and have died
        self._ended: list[str] = []
        self._crashed: list[str] = []
        self._woken = asyncio.Event()

    async def open(self) -> None:
        """Take over the list of an earlier start, and offer the types.

        Raises `BrokerUnavailable`, `StorageFull`, or `RecordChanged`.
        """
        await self._broker.subscribe(subjects.FLEET_PLAN_CHANGED, self._on_change)
        table = self._manager.plan.settings.fleet
        assert table is not None
        left = await self._store.read_machines()
        known = machine_life.resume(left, table.records)
        known = replace(
            known, policies=table.policies, policy=table.policy, budget_per_hour=table.budget
        )
        self._known = await self._store.write_machines(known)
        self._files.remove_ended(left.machines.keys() - known.machines.keys(), known.machines)

    async def run(self) -> None:
        """Follow the plan until cancelled; the machines are left to the manager then.

        Call `open` before. An error of the broker is logged once and tried again: meanwhile nothing
        is started.
        """
        trouble = ""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._woken.clear()
                try:
                    await self._turn(tasks)
                except (BrokerUnavailable, StoreRefused, StorageFull) as error:
                    if trouble != (trouble := str(error)):
                        log.warning("fleet_interrupted", reason=trouble)
                    await asyncio.sleep(LOOK_SECONDS)
                else:
                    trouble = ""
                    await self._wait()

    async def _turn(self, tasks: asyncio.TaskGroup) -> None:
        """Store what has to be, and then start and end workers accordingly."""
        self._plan = await self._store.read_plan()
        await self._update()
        for name in self._known.in_state(MachineState.RUNNING):
            if name not in self._workers:
                self._start(name)
        for name in self._known.in_state(MachineState.DRAINING, MachineState.RECLAIMING):
            if name not in self._ending:
                self._ending.add(name)
                tasks.create_task(self._end(name), name=f"end {name}")

    async def _update(self) -> None:
        """Bring the list up to date in the broker, with what the notes of callbacks say."""
        now, known = self._broker.clock.now(), self._known
        ended, crashed = list(self._ended), list(self._crashed)
        changed = known
        for name in crashed:
            changed = machine_life.with_crash(changed, name)
        for name in ended:
            changed = machine_life.without_worker(changed, name, now)
        changed = machine_life.advance(changed, self._plan, now)
        if changed is not known:
            try:
                self._known = await self._store.write_machines(changed)
            except RecordChanged as conflict:  # after a loss of the broker's store
                revision = conflict.newer.revision if conflict.newer else 0
                self._known = replace(known, revision=revision)
                raise BrokerUnavailable("the list of machines was written by another") from None
            _log_changes(known, self._known)
        self._ended, self._crashed = self._ended[len(ended) :], self._crashed[len(crashed) :]

    def _start(self, name: str) -> None:
        program = self._manager.plan.machine_program(name, self._known.machines[name])
        self._files.logs.mkdir(exist_ok=True)
        on_death = partial(self._on_death, name)
        child = self._manager.add(_SERVICE, program, on_death, self._files.logs)
        child.is_starting = False  # however often it dies, `up` and the other machines go on
        self._workers[name] = child

    async def _end(self, name: str) -> None:
        """End a machine: its worker drains, and is killed after the notice or the drain time."""
        if child := self._workers.get(name):
            await child.stop(self._seconds_to_end(name))
            if child.status != 0:
                await self._announce(name)
            self._manager.remove(_SERVICE, child)
            del self._workers[name]
            self._files.remove_ended([name], self._workers)
        self._ending.discard(name)
        self._ended.append(name)
        self._woken.set()

    def _seconds_to_end(self, name: str) -> float:
        kind = self._known.types[self._known.machines[name].type]
        return kind.notice_seconds if kind.spot else self._manager.plan.kill_after_seconds(_SERVICE)

    async def _on_death(self, name: str) -> None:
        self._crashed.append(name)
        self._woken.set()
        await self._announce(name)

    async def _on_change(self, _: object) -> None:
        self._woken.set()

    async def _wait(self) -> None:
        """Wait for a change of plan or worker, or until time changes the list; a second at most."""
        now = self._broker.clock.now()
        due = machine_life.next_change(self._known, self._plan, now) - now
        try:
            async with asyncio.timeout(min(due, LOOK_SECONDS)):
                await self._woken.wait()
        except TimeoutError:
            return


async def withdraw_machines(broker: Broker) -> None:
    """Store that there is no provider and no machine, if another start has left some.

    Raises `BrokerUnavailable`, `StorageFull` or `RecordChanged`.
    """
    store = FleetStore(broker)
    left = await store.read_machines()
    if left.types:
        await store.write_machines(MachineList(revision=left.revision))


def _log_changes(before: MachineList, after: MachineList) -> None:
    for name, machine in after.machines.items():
        known = before.machines.get(name)
        if known is None or known.state is not machine.state:
            log.info("machine_changed", machine=name, type=machine.type, state=machine.state)
    for name in before.machines.keys() - after.machines.keys():
        log.info("machine_forgotten", machine=name, type=before.machines[name].type)
