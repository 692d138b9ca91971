"""Keeps a running worker at the models that it has to serve, as registry and records change.

These are the models of its settings and those that operators have it serve by record, by its type
or its id. A name without a version follows the registry: a new version is loaded before the one
that it replaces is drained, if both fit into memory.
"""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from gpu_worker.engines.engine import DoesNotFit
from gpu_worker.models.memory_plan import MemoryPlan
from gpu_worker.models.metrics import LOAD_FAILURES
from gpu_worker.models.model_manager import MAX_REASON, ManagedModel, ModelManager
from gpu_worker.models.record_checks import ModelRefused, check_model
from gpu_worker.models.registration import describe_missing
from gpu_worker.settings import WorkerSettings
from registry.models import Model, Version
from registry.store import Registry
from streams.accounts.credentials_file import InvalidCredentials
from streams.accounts.pinned_models import PinnedModels, read_pinned_models
from streams.broker.reconnecting_client import FILE_CHECK_SECONDS
from streams.errors import MillstreamError, ModelNotFound

log = structlog.get_logger()

RENEWED_SECONDS = FILE_CHECK_SECONDS + 3.0  # for a connection with renewed credentials
RECHECK_SECONDS = 5.0  # until a model that was not permitted or too large is looked at again


class _NotServed(MillstreamError):
    """A model is not served for now; `reason` is a label of the metric."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ServedModelsFollower:
    """Adds and removes models of one worker's manager.

    `make_model` returns a model version to be managed. One that cannot be served, and why, is in
    the manager's `not_loaded`, which heartbeats tell; it never ends the worker.
    """

    def __init__(
        self,
        registry: Registry,
        settings: WorkerSettings,
        manager: ModelManager,
        memory: MemoryPlan,
        make_model: Callable[[Model, Version], ManagedModel],
    ) -> None:
        self._registry, self._settings, self._manager = registry, settings, manager
        self._memory, self._make_model = memory, make_model
        self._changed = asyncio.Event()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._resolved: dict[str, str] = {}  # by name, the MODEL@VERSION that it last was served as
        self._pins = self._new_pins = read_pinned_models(settings.nats_files.creds)
        self._new_since = 0.0
        self._replaced_by: dict[str, str] = {}  # what names meant before, and what they mean now
        self._logged_reasons: dict[str, str] = {}  # why names are not served, as it was logged

    @property
    def names(self) -> list[str]:
        """The names of all models to serve, as settings and records have them."""
        served, settings = self._registry.served, self._settings
        records = (served.get(on) for on in (settings.type or "", settings.id))
        by_record = [name for record in records if record for name in record.models]
        return list(dict.fromkeys([*settings.model, *by_record]))

    async def run(self) -> None:
        """Follow until cancelled; models that are just being removed are left as they are then."""
        self._registry.on_change(self._changed.set)
        self._manager.on_change = self._changed.set
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                await self._follow(tasks)
                try:
                    async with asyncio.timeout(RECHECK_SECONDS if self._logged_reasons else None):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        wanted, problems = await self._resolve_all()
        for key, (model, version) in wanted.items():
            if key not in self._manager.models:
                try:
                    await self._add(key, model, version)
                except Exception as error:  # of another model's files, which its plan has to read
                    problems[key] = _NotServed("load", f"{type(error).__name__}: {error}")
        self._tell(problems)
        for key in list(self._manager.models):
            if key not in wanted and key not in self._leaving and not self._is_kept(key):
                self._leaving[key] = tasks.create_task(self._remove(key), name=f"leave-{key}")

    async def _resolve_all(self) -> tuple[dict[str, tuple[Model, Version]], dict[str, _NotServed]]:
        """Return what is to be served by `MODEL@VERSION`, and the names that cannot be."""
        wanted: dict[str, tuple[Model, Version]] = {}
        problems: dict[str, _NotServed] = {}
        pins = self._read_pins()
        for name in self.names:
            try:
                model, version = await self._resolve(name, pins, wanted)
            except _NotServed as problem:
                problems[name] = problem
                found = self._find(self._resolved.get(name))
                if found is None:
                    continue
                model, version = found  # a version that cannot be served leaves that before it
            key, before = f"{model.name}@{version.id}", self._resolved.get(name)
            if before not in (None, key):
                self._replaced_by[before] = key
            self._resolved[name] = key
            wanted[key] = model, version
        self._replaced_by = {k: new for k, new in self._replaced_by.items() if k not in wanted}
        return wanted, problems

    async def _resolve(
        self, name: str, pins: PinnedModels, wanted: Mapping[str, object]
    ) -> tuple[Model, Version]:
        """Return what a name means now; raises `_NotServed` if this worker cannot serve it."""
        found = self._find(name)
        if found is None:
            raise _NotServed("not_registered", describe_missing(self._registry, name))
        model, version = found
        key = f"{model.name}@{version.id}"
        if key in self._manager.models:
            return found
        if self._settings.tensor_parallel_size > 1 and {*wanted, *self._manager.models}:
            raise _NotServed(
                "refused",
                f"a worker with --tensor-parallel-size serves one version: restart it for {key}",
            )
        if not pins.has(model.name, version.id):
            raise _NotServed("not_permitted", pins.explain(self._settings.id, key))
        try:
            check_model(self._settings.destinations, model, version)
            await self._memory.check(key, model, version)
        except ModelRefused as refused:
            raise _NotServed("refused", str(refused)) from None
        except DoesNotFit as refused:
            raise _NotServed("too_large", str(refused)) from None
        except Exception as error:  # of files that cannot be read
            raise _NotServed("load", f"{type(error).__name__}: {error}") from error
        return found

    def _find(self, name: str | None) -> tuple[Model, Version] | None:
        try:
            return self._registry.resolve(name or "")
        except ModelNotFound:
            return None

    def _read_pins(self) -> PinnedModels:
        """Return the models that the worker's NATS user is for.

        Those of a renewed file count once the connection has been made anew with it.
        """
        now = asyncio.get_running_loop().time()
        try:
            found = read_pinned_models(self._settings.nats_files.creds)
        except InvalidCredentials as error:
            log.warning("nats_credentials_unreadable", reason=str(error))
            return self._pins
        if found != self._new_pins:
            self._new_pins, self._new_since = found, now
        if now - self._new_since > RENEWED_SECONDS:
            self._pins = self._new_pins
        return self._pins

    async def _add(self, key: str, model: Model, version: Version) -> None:
        await self._account_for_unbounded()
        await self._plan_memory({key: (model, version)})
        self._manager.add(key, self._make_model(model, version))
        log.info("model_added", model=key)

    async def _remove(self, key: str) -> None:
        deadline = asyncio.get_running_loop().time() + self._settings.drain_seconds
        try:
            await self._manager.remove(
                key, lambda: max(0.0, deadline - asyncio.get_running_loop().time())
            )
        finally:
            del self._leaving[key]
        self._manager.not_loaded.pop(key, None)
        self._replaced_by.pop(key, None)
        try:
            await self._plan_memory({})
        except Exception as error:  # the others keep the memory that was planned before
            log.warning("memory_not_planned", reason=f"{type(error).__name__}: {error}")
        self._changed.set()

    async def _account_for_unbounded(self) -> None:
        """Count what models take that were loaded before there was anything to divide."""
        for key, taken in self._manager.taken_bytes.items():
            if not taken:
                managed = self._manager.models[key]
                alone = await self._memory.bytes_alone(managed.model, managed.version)
                self._manager.set_taken(key, alone)

    async def _plan_memory(self, added: Mapping[str, tuple[Model, Version]]) -> None:
        current = {key: (m.model, m.version) for key, m in self._manager.models.items()}
        loaded = self._manager.taken_bytes
        self._manager.plan_memory(await self._memory.divide_beside({**current, **added}, loaded))

    def _is_kept(self, key: str) -> bool:
        """Return True while what replaces a version is still to be loaded beside it."""
        successor = self._replaced_by.get(key)
        return (
            successor is not None
            and successor in self._manager.models
            and self._manager.will_load(successor)
        )

    def _tell(self, problems: Mapping[str, _NotServed]) -> None:
        """Log what cannot be served, once for each reason, and have heartbeats tell it."""
        for name in self._logged_reasons.keys() - problems.keys():
            self._manager.not_loaded.pop(name, None)
        for name, problem in problems.items():
            text = str(problem)[:MAX_REASON]
            self._manager.not_loaded[name] = text
            if self._logged_reasons.get(name) != text:
                log.warning("model_not_served", model=name, kind=problem.reason, reason=text)
                LOAD_FAILURES.labels(name.partition("@")[0], problem.reason).inc()
        self._logged_reasons = {
            name: str(problem)[:MAX_REASON] for name, problem in problems.items()
        }
