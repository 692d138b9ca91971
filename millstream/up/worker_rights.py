"""Gives the workers' NATS users rights for models that they have to serve later on."""

import asyncio
from collections.abc import Iterable

import structlog

from millstream.up.launch_plan import LaunchPlan, WorkerUser
from registry.store import Registry
from streams.errors import ModelNotFound

log = structlog.get_logger()

_LOOK_SECONDS = 1.0  # after which there may be workers that have just been started


class WorkerRights:
    """Writes a worker's credentials anew when a record has it serve another model.

    The worker takes them up within seconds. Rights are only added: a worker may be draining what it
    serves no longer. They are those of its own models again when `up` starts it anew.
    """

    def __init__(self, plan: LaunchPlan, registry: Registry) -> None:
        self._plan, self._registry = plan, registry

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        changed = asyncio.Event()
        self._registry.on_change(changed.set)
        while True:
            changed.clear()
            for name, user in list(self._plan.workers.items()):
                await self._grant(name, user)
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _grant(self, name: str, user: WorkerUser) -> None:
        served = self._registry.served
        records = [served[on] for on in (name, user.type) if on in served]
        found = {*self._resolve(each for record in records for each in record.models)}
        if missing := sorted(found - {*user.models}):
            models = (*user.models, *missing)
            await asyncio.to_thread(self._plan.accounts.add_worker, name, models)
            self._plan.workers[name] = WorkerUser(user.type, models)
            log.info("worker_rights_added", worker=name, models=missing)

    def _resolve(self, names: Iterable[str]) -> Iterable[str]:
        for name in names:
            try:
                yield self._registry.resolve(name)[0].name
            except ModelNotFound:
                continue
