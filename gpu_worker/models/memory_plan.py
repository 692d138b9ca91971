"""Division of one worker's memory over the models that it serves, as these come and go."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gpu_worker.engines import factory
from gpu_worker.models import model_eviction
from gpu_worker.models.loading import run_in_thread, weight_files
from gpu_worker.settings import WorkerSettings
from registry.models import Model, Version

ModelVersions = Mapping[str, tuple[Model, Version]]


@dataclass(frozen=True)
class MemoryShares:
    """The memory of a worker's models in bytes: of all together, the most and the least of each.

    A model without weights has 0. So has the only model of a worker without `--memory`: it takes
    what its engine finds free.
    """

    budget: int = 0
    shares: Mapping[str, int] = field(default_factory=dict)
    needs: Mapping[str, int] = field(default_factory=dict)


class MemoryPlan:
    """Divides the memory of a worker; what is free is measured before anything is loaded."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._free: tuple[int, float] | None = None  # bytes, and the share that may be filled
        self._needs: dict[tuple[str, str], int] = {}  # by model and version

    async def divide(self, versions: ModelVersions) -> MemoryShares:
        """Return the memory of each model of a worker that starts with these.

        Raises `DoesNotFit` for a model that is too large even alone.
        """
        if not any(weight_files(version) for _, version in versions.values()):
            return self._unbounded(versions)
        if self._settings.memory is None:
            await self._measure_free()
            if len(versions) == 1:
                return self._unbounded(versions)
        needs = {name: await self._needed_bytes(*each) for name, each in versions.items()}
        budget = await self._budget(needs)
        return MemoryShares(budget, model_eviction.divide_budget(budget, needs), needs)

    async def divide_beside(
        self, versions: ModelVersions, loaded: Mapping[str, int]
    ) -> MemoryShares:
        """Return the memory of each model beside `loaded`, the bytes that the loaded ones take.

        Where there is no `--memory`, all that is free may be used to load another model beside
        them. Raises `DoesNotFit` for a model that is too large even alone.
        """
        needs = {name: await self._needed_bytes(*each) for name, each in versions.items()}
        if not any(needs.values()):
            return self._unbounded(versions)
        budget = await self._budget(needs)
        if self._settings.memory is None:
            free, _ = await self._measure_free()
            others = sum(need for name, need in needs.items() if name not in loaded)
            budget = max(budget, min(free, sum(loaded.values()) + others))
        return MemoryShares(budget, model_eviction.divide_budget(budget, needs), needs)

    async def bytes_alone(self, model: Model, version: Version) -> int:
        """Return the bytes that a model takes whose engine may use what it finds free."""
        if not (needed := await self._needed_bytes(model, version)):
            return 0
        free, share = await self._measure_free()
        return model_eviction.compute_budget(free, [needed], share)

    async def check(self, name: str, model: Model, version: Version) -> None:
        """Raise `DoesNotFit`, with the numbers, for a model that is too large even alone."""
        if needed := await self._needed_bytes(model, version):
            budget = self._settings.memory or (await self._measure_free())[0]
            model_eviction.divide_budget(budget, {name: needed})

    async def _budget(self, needs: Mapping[str, int]) -> int:
        if self._settings.memory is not None:
            return self._settings.memory
        free, share = await self._measure_free()
        return model_eviction.compute_budget(free, needs.values(), share)

    async def _measure_free(self) -> tuple[int, float]:
        if self._free is None:
            self._free = await run_in_thread(factory.free_memory, "memory")
        return self._free

    async def _needed_bytes(self, model: Model, version: Version) -> int:
        """Return the least memory, in bytes, to plan for a model; 0 without weights here."""
        key = model.name, version.id
        if key not in self._needs:
            self._needs[key] = await self._read_needed_bytes(model, version)
        return self._needs[key]

    async def _read_needed_bytes(self, model: Model, version: Version) -> int:
        if not (files := weight_files(version)):
            return 0
        directory = Path(version.directory or "")
        size = await run_in_thread(
            partial(factory.loaded_weight_bytes, directory, files, model.engine), "memory"
        )
        adapter_bytes = self._settings.adapter_bytes if model.engine == "transformers" else 0
        return model_eviction.estimate_needed_bytes(size, adapter_bytes)

    @staticmethod
    def _unbounded(versions: ModelVersions) -> MemoryShares:
        nothing = dict.fromkeys(versions, 0)
        return MemoryShares(0, nothing, nothing)
