"""Plans which models are loaded when not all fit in memory. Pure: time comes in as an argument.

Every model has a share of the memory; the shares are sized so that as many models as possible fit
together. A model with work and without an engine waits, first come first served. The first waiting
model gets its memory by evicting others: idle ones first, then the least recently used. A model to
be evicted accepts nothing new and is closed when its last request has ended, but never before it
has been loaded for the minimum time, so that models which are all busy take turns.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from math import inf

from gpu_worker.engines.engine import DoesNotFit

# Fraction of the weights' size planned for steps and KV; engines measure it when they load
WORKING_MEMORY_SHARE = 0.25


def estimate_needed_bytes(weight_bytes: int, adapter_bytes: int = 0) -> int:
    """Return the least bytes to plan for a model: its weights, a quarter of that, its adapters."""
    return weight_bytes + int(weight_bytes * WORKING_MEMORY_SHARE) + adapter_bytes


def compute_budget(free_bytes: int, needed: Iterable[int], share: float) -> int:
    """Return the budget in bytes when none is set: what all models need, plus `share` of the rest.

    The rest is the free memory that they leave; the budget never exceeds `free_bytes`.
    """
    total = sum(needed)
    return min(free_bytes, total + int(max(0, free_bytes - total) * share))


def divide_budget(budget: int, needed: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes that each model gets when it is loaded: its need or more; 0 for a need of 0.

    Let n be how many of the largest models fit in the budget together. Each model gets its need
    and an nth of what those n leave, so that any n models always fit. Raises `DoesNotFit` for a
    model that is too large alone.
    """
    largest = sorted(((need, name) for name, need in needed.items() if need), reverse=True)
    fitting = taken = 0
    for need, name in largest:
        if need > budget:
            raise DoesNotFit(
                f"{name} needs {need:,} bytes for its weights and to work with, and may take "
                f"{budget:,} (--memory)"
            )
        if taken + need > budget:
            break
        fitting, taken = fitting + 1, taken + need
    extra = (budget - taken) // max(1, fitting)
    return {name: need + extra if need else 0 for name, need in needed.items()}


@dataclass(frozen=True)
class Decision:
    """The planner's next step, and the time to ask again even if nothing has changed.

    `draining` models accept nothing new; `evict` is an idle one of them; `load` fits in the free
    memory. `next_check_at` is on the caller's clock; infinite: only after a change.
    """

    load: str | None = None
    evict: str | None = None
    draining: frozenset[str] = frozenset()
    next_check_at: float = inf


@dataclass
class _LoadedModel:
    loaded_at: float
    used_at: float
    is_busy: bool = False


@dataclass
class EvictionPlanner:
    """Tracks which models are loaded and decides which to load or evict next.

    `shares` and `budget` are bytes; no share is larger than the budget. The caller reports what it
    has done: `mark_loading` before memory is taken, `mark_closed` when it was given back. Times are
    seconds of any one clock.
    """

    budget: int
    shares: Mapping[str, int]
    min_residency_seconds: float
    _loaded: dict[str, _LoadedModel] = field(default_factory=dict)
    _waiting: list[str] = field(default_factory=list)

    @property
    def loaded(self) -> Set[str]:
        return self._loaded.keys()

    @property
    def free_bytes(self) -> int:
        return self.budget - sum(self.shares[name] for name in self._loaded)

    def mark_loading(self, name: str, now: float) -> None:
        """Count a model's memory as taken from now on."""
        assert self.shares[name] <= self.free_bytes, f"{name} does not fit"
        self._loaded[name] = _LoadedModel(now, now)
        self._waiting = [other for other in self._waiting if other != name]

    def mark_ready(self, name: str, now: float) -> None:
        """Record that a model's engine is ready; its minimum residency begins."""
        self._loaded[name] = _LoadedModel(now, now)

    def mark_closed(self, name: str) -> None:
        """Count a model's memory as free: it was closed, has crashed or could not be loaded."""
        del self._loaded[name]

    def observe(self, busy: Set[str], now: float) -> None:
        """Record which models have work now: loaded ones count as used, the others start to wait.

        A model without work waits no longer.
        """
        for name, model in self._loaded.items():
            if name in busy or model.is_busy:
                model.used_at = now
            model.is_busy = name in busy
        not_waiting = self._loaded.keys() | (self.shares.keys() - busy)
        self._waiting = [name for name in self._waiting if name not in not_waiting]
        self._waiting += [n for n in self.shares if n in busy - self.loaded - {*self._waiting}]

    def decide(self, now: float) -> Decision:
        """Return the next step for the first waiting model; the others wait, so none starves."""
        if not self._waiting:
            return Decision()
        first = self._waiting[0]
        missing = self.shares[first] - self.free_bytes
        if missing <= 0:
            return Decision(load=first)
        victims = self._choose_victims(missing, now)
        idle = [name for name in victims if not self._loaded[name].is_busy]
        return Decision(
            None, idle[0] if idle else None, frozenset(victims), self._next_check_at(now)
        )

    def _choose_victims(self, missing: int, now: float) -> list[str]:
        """Choose models to evict for `missing` bytes: idle first, then least recently used.

        A model within its minimum residency is never chosen, so the result may not be enough.
        """
        order = sorted(self._loaded.items(), key=lambda item: (item[1].is_busy, item[1].used_at))
        victims: list[str] = []
        for name, model in order:
            if missing > 0 and model.loaded_at + self.min_residency_seconds <= now:
                victims.append(name)
                missing -= self.shares[name]
        return victims

    def _next_check_at(self, now: float) -> float:
        """Return when the next model reaches its minimum residency; infinite if all have."""
        ends = (model.loaded_at + self.min_residency_seconds for model in self._loaded.values())
        return min((end for end in ends if end > now), default=inf)
