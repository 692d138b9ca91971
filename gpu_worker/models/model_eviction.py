"""Which models are loaded when not all fit the memory at once. Pure: time comes in as an argument.

Every model has a share of the memory, large enough that as many of them as possible fit together.
A model that has work and is not loaded waits in line, first come first served; room for the first
in line is made by closing those that have been idle for longest, or have been used least recently.
A model that is to make room takes nothing new, is closed when its last request has ended, and never
before it has been loaded for the minimum time: so models that are all busy take turns.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from math import inf

from gpu_worker.engines.engine import DoesNotFit

# Of the weights, planned for steps and KV; engines measure when they load
WORKING_MEMORY_SHARE = 0.25


def estimate_needed_bytes(weight_bytes: int, adapter_bytes: int = 0) -> int:
    """The least share of memory that a model is planned with."""
    return weight_bytes + int(weight_bytes * WORKING_MEMORY_SHARE) + adapter_bytes


def compute_budget(free_bytes: int, least: Iterable[int], share: float) -> int:
    """The budget when none is set: what all models need, and `share` of what they leave."""
    together = sum(least)
    return min(free_bytes, together + int(max(0, free_bytes - together) * share))


def divide_budget(budget: int, least: Mapping[str, int]) -> dict[str, int]:
    """How much memory each model gets when it is loaded: what `least` says or more, 0 for 0.

    As many models as fit together in the worst case share what is left over equally, so that any
    so many of them always fit. Raises `DoesNotFit` for a model that is too large alone.
    """
    largest = sorted(((need, name) for name, need in least.items() if need), reverse=True)
    together = taken = 0
    for need, name in largest:
        if need > budget:
            raise DoesNotFit(
                f"{name} needs {need:,} bytes for its weights and to work with, and may take "
                f"{budget:,} (--memory)"
            )
        if taken + need > budget:
            break
        together, taken = together + 1, taken + need
    more = (budget - taken) // max(1, together)
    return {name: need + more if need else 0 for name, need in least.items()}


@dataclass(frozen=True)
class Decision:
    """What to do now, and when to ask again though nothing has changed.

    `leaving` take nothing new; `close` is one of them, and idle; `load` fits.
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
    """The books of what is loaded, and the decision what to do next.

    `shares` and `budget` are bytes; no share is larger than the budget. The caller reports what it
    has done: `loading` before memory is taken, `closed` when it was given back.
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
        """Its memory is taken from now on."""
        assert self.shares[name] <= self.free_bytes, f"{name} does not fit"
        self._loaded[name] = _LoadedModel(now, now)
        self._waiting = [other for other in self._waiting if other != name]

    def mark_ready(self, name: str, now: float) -> None:
        """It can work; its minimum time begins."""
        self._loaded[name] = _LoadedModel(now, now)

    def mark_closed(self, name: str) -> None:
        """Its memory is free: it was closed, has crashed or could not be loaded."""
        del self._loaded[name]

    def observe(self, busy: Set[str], now: float) -> None:
        """Which models have work now. Who is loaded was used, who is not gets in line."""
        for name, model in self._loaded.items():
            if name in busy or model.is_busy:
                model.used_at = now
            model.is_busy = name in busy
        gone = self._loaded.keys() | (self.shares.keys() - busy)
        self._waiting = [name for name in self._waiting if name not in gone]
        self._waiting += [n for n in self.shares if n in busy - self.loaded - {*self._waiting}]

    def decide(self, now: float) -> Decision:
        """What the first in line needs; who comes behind it waits, so that nobody starves."""
        if not self._waiting:
            return Decision()
        first = self._waiting[0]
        missing = self.shares[first] - self.free_bytes
        if missing <= 0:
            return Decision(load=first)
        leaving = self._choose_victims(missing, now)
        idle = [name for name in leaving if not self._loaded[name].is_busy]
        return Decision(
            None, idle[0] if idle else None, frozenset(leaving), self._next_check_at(now)
        )

    def _choose_victims(self, missing: int, now: float) -> list[str]:
        """Who makes room: idle ones first, then by last use; those that may not go yet are left."""
        order = sorted(self._loaded.items(), key=lambda item: (item[1].is_busy, item[1].used_at))
        victims: list[str] = []
        for name, model in order:
            if missing > 0 and model.loaded_at + self.min_residency_seconds <= now:
                victims.append(name)
                missing -= self.shares[name]
        return victims

    def _next_check_at(self, now: float) -> float:
        """When the next model has been loaded for long enough."""
        ends = (model.loaded_at + self.min_residency_seconds for model in self._loaded.values())
        return min((end for end in ends if end > now), default=inf)
