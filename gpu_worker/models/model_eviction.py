"""Plans which models are loaded when not all fit in memory. Pure: time comes in as an argument.

Every model has a share of the memory; the shares are sized so that as many models as possible fit
together. A model with work and without an engine waits, first come first served. The first waiting
model gets its memory by evicting others: idle ones first, the fewest, and among these the one that
costs least to have back: the time of its load times how much it is used. A model to be evicted
accepts nothing new and is closed when its last request has ended, but never before it has been
loaded for the minimum time, so that models which are all busy take turns.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from math import exp, inf

from gpu_worker.engines.engine import DoesNotFit

# Fraction of the weights' size planned for steps and KV; engines measure it when they load
WORKING_MEMORY_SHARE = 0.25
USE_SECONDS = 60.0  # the use of a model is its share of busy time over about this long


def estimate_needed_bytes(weight_bytes: int, adapter_bytes: int = 0) -> int:
    """Return the least memory, in bytes, with which a model is planned to work.

    That is its weights, a quarter of their size for steps and KV cache, and its LoRA adapters.
    """
    return weight_bytes + int(weight_bytes * WORKING_MEMORY_SHARE) + adapter_bytes


def compute_budget(free_bytes: int, needed: Iterable[int], share: float) -> int:
    """Return the bytes that all models together may take, where the operator has set no limit.

    That is the sum of what the models need, plus `share` (0 to 1) of the free memory beyond it, and
    never more than `free_bytes`.
    """
    total = sum(needed)
    return min(free_bytes, total + int(max(0, free_bytes - total) * share))


def divide_budget(budget: int, needed: Mapping[str, int]) -> dict[str, int]:
    """Return, by model name, the bytes that each model may take of `budget` when it is loaded.

    Let n be how many of the largest models fit in the budget together. Each model gets its need and
    an nth of what those n leave, so that any n models always fit. A model that needs 0 gets 0.
    Raises `DoesNotFit` for a model that is too large alone.
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
    """The planner's next step, for its caller to carry out: `load`, `evict`, or neither.

    `load` names a model that fits in the free memory, `evict` an idle model to close. `draining`
    models must accept nothing new, since they are to be evicted. Call `decide` again after a
    change, and at `next_check_at` (on the caller's clock; infinite: only after a change).
    """

    load: str | None = None
    evict: str | None = None
    draining: frozenset[str] = frozenset()
    next_check_at: float = inf


@dataclass
class _LoadedModel:
    taken_bytes: int
    loaded_at: float
    used_at: float
    load_seconds: float = 0.0
    is_busy: bool = False
    use: float = 0.0  # share of recent time with work
    _seen_at: float = -inf

    def observe(self, is_busy: bool, now: float) -> None:
        """Count the time since the last call as busy if there was work then."""
        kept = exp(-(now - self._seen_at) / USE_SECONDS)
        self.use = kept * self.use + (1 - kept) * self.is_busy
        if is_busy or self.is_busy:
            self.used_at = now
        self.is_busy, self._seen_at = is_busy, now

    @property
    def reload_cost(self) -> tuple[float, float]:
        """The expected cost of evicting it; of two alike, it is higher for the one used later."""
        return self.load_seconds * self.use, self.used_at


@dataclass
class EvictionPlanner:
    """Tracks which of one worker's models are loaded, and decides which to load or evict next.

    `budget`, `shares` (the most memory of each model) and `needs` (the least with which each can be
    loaded; its share if it is not there) are bytes; no share is larger than the budget. All may be
    replaced by `plan`. A loaded model is kept for at least `min_residency_seconds`. The planner
    loads nothing: its caller does, and reports it by `mark_loading` before memory is taken and
    `mark_closed` when it was given back. `now` is in seconds of any one clock.
    """

    budget: int
    shares: Mapping[str, int]
    min_residency_seconds: float
    needs: Mapping[str, int] = field(default_factory=dict)
    _loaded: dict[str, _LoadedModel] = field(default_factory=dict)
    _waiting: list[str] = field(default_factory=list)

    def plan(self, budget: int, shares: Mapping[str, int], needs: Mapping[str, int]) -> None:
        """Take over the memory of another set of models, which has all that are loaded.

        What is loaded keeps the memory that it took. Beside that, a model may be loaded with less
        than its share, if no less than it `needs`.
        """
        assert self._loaded.keys() <= shares.keys()
        self.budget, self.shares, self.needs = budget, shares, needs

    def set_taken(self, name: str, taken_bytes: int) -> None:
        """Record what a loaded model takes that was loaded without a share of its own."""
        self._loaded[name].taken_bytes = taken_bytes

    @property
    def taken_bytes(self) -> dict[str, int]:
        """The bytes that each loaded or loading model takes."""
        return {name: model.taken_bytes for name, model in self._loaded.items()}

    @property
    def loaded(self) -> Set[str]:
        """Names of the models that take memory: those loaded and those being loaded."""
        return self._loaded.keys()

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that no loaded or loading model takes."""
        return self.budget - sum(model.taken_bytes for model in self._loaded.values())

    def fits(self, name: str) -> bool:
        """Return True if a model can be loaded now, beside those that are."""
        return self._least(name) <= self.free_bytes

    def mark_loading(self, name: str, now: float) -> int:
        """Record that a model is being loaded, and return the bytes that it may take.

        These are its share, or what is free, if that is less. It no longer waits. The model must
        fit.
        """
        assert self.fits(name), f"{name} does not fit"
        taken = min(self.shares[name], max(self.free_bytes, self._least(name)))
        self._loaded[name] = _LoadedModel(taken, now, now)
        self._waiting = [other for other in self._waiting if other != name]
        return taken

    def mark_ready(self, name: str, now: float) -> None:
        """Record that a model's engine is ready; its minimum residency begins at `now`."""
        model = self._loaded[name]
        self._loaded[name] = _LoadedModel(model.taken_bytes, now, now, now - model.loaded_at)

    def mark_closed(self, name: str) -> None:
        """Record that a model takes no memory: it was closed, has crashed or failed to load."""
        del self._loaded[name]

    def observe(self, busy: Set[str], now: float) -> None:
        """Record that the models named in `busy`, and no others, have work now.

        Loaded ones count as used; the others begin to wait for an engine or keep their place. A
        model that no longer has work stops waiting.
        """
        for name, model in self._loaded.items():
            model.observe(name in busy, now)
        not_waiting = self._loaded.keys() | (self.shares.keys() - busy)
        self._waiting = [
            name for name in self._waiting if name in self.shares and name not in not_waiting
        ]
        self._waiting += [n for n in self.shares if n in busy - self.loaded - {*self._waiting}]

    def decide(self, now: float) -> Decision:
        """Return the next step for the model that has waited longest; changes nothing.

        The other models wait until that one is loaded, so that none starves. There is nothing to
        load or evict if no model waits, or if the models to be evicted are still busy or too newly
        loaded.
        """
        if not self._waiting:
            return Decision()
        first = self._waiting[0]
        if self.fits(first):
            return Decision(load=first)
        victims = self._choose_victims(self.shares[first] - self.free_bytes, now)
        idle = [name for name in victims if not self._loaded[name].is_busy]
        return Decision(
            None, idle[0] if idle else None, frozenset(victims), self._next_check_at(now)
        )

    def _least(self, name: str) -> int:
        return min(self.needs.get(name, self.shares[name]), self.shares[name])

    def _choose_victims(self, missing: int, now: float) -> list[str]:
        """Choose models to evict for `missing` bytes: idle ones if these are enough, the fewest.

        The last one is that which costs least of those that are large enough. A model within its
        minimum residency is never chosen, so the result may not be enough.
        """
        victims: list[str] = []
        for is_busy in (False, True):
            candidates = {
                name: model
                for name, model in self._loaded.items()
                if model.is_busy is is_busy and model.loaded_at + self.min_residency_seconds <= now
            }
            while missing > 0 and candidates:
                victims.append(_choose_victim(candidates, missing))
                missing -= candidates.pop(victims[-1]).taken_bytes
        return victims

    def _next_check_at(self, now: float) -> float:
        """Return when the next model reaches its minimum residency; infinite if all have."""
        ends = (model.loaded_at + self.min_residency_seconds for model in self._loaded.values())
        return min((end for end in ends if end > now), default=inf)


def _choose_victim(candidates: Mapping[str, _LoadedModel], missing: int) -> str:
    """Return the cheapest model that takes `missing` bytes alone, or the largest if none does."""
    enough = [name for name, model in candidates.items() if model.taken_bytes >= missing]
    if enough:
        return min(enough, key=lambda name: candidates[name].reload_cost)
    return max(candidates, key=lambda name: candidates[name].taken_bytes)
