"""A step model of an engine: continuous batching, chunked prefill, paged KV, priorities.

It schedules as `gpu_worker/engines/paged/batch/scheduler.py` does (see docs/engine.md), but counts tokens
where that one keeps them, so that a step costs the same however many sequences decode in it. That
is what lets a thousand of them run beside each other on one core.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from simulation.prefix_cache import PrefixCacheModel
from simulation.request import SimulatedRequest
from simulation.step_model import StepModel
from streams.subjects import Priority

# The scheduler's own (gpu_worker/engines/paged/batch/scheduler.py), which a test holds against these.
LESS_URGENT_SHARE = 1 / 3
RETURN_STEPS = 64


@dataclass(slots=True, eq=False)
class EngineRun:
    """A request in the engine. `pending` tokens must be computed before it decodes on."""

    request: SimulatedRequest
    number: int  # in order of arrival
    pending: int
    computed_tokens: int = 0  # tokens whose KV is in place; while it decodes, as of step `since`
    since: int = 0  # the step after which it began to decode
    decoding: bool = False
    was_preempted: bool = False
    is_removed: bool = False

    @property
    def priority(self) -> Priority:
        return self.request.priority


@dataclass
class StepResult:
    """What a step brought: who got the first token, and who the last."""

    first: list[SimulatedRequest] = field(default_factory=list)
    ended: list[SimulatedRequest] = field(default_factory=list)


@dataclass
class _PriorityRuns:
    """The runs of one priority, oldest first; who prefills is running, too."""

    running: dict[int, EngineRun] = field(default_factory=dict)  # by number, in order of admission
    prefilling: dict[int, EngineRun] = field(default_factory=dict)
    waiting: deque[EngineRun] = field(default_factory=deque)


class SimulatedEngine:
    """Steps over the requests it was given; its owner keeps the time.

    Call `begin` for the seconds of the next step, or None if there is nothing to do, and `end` when
    they have passed. In between, what is added waits, and what is cancelled goes when it ends.
    """

    def __init__(self, model: StepModel, prefixes: PrefixCacheModel | None = None) -> None:
        self.model = model
        self.prompt_tokens = self.generated_tokens = self.preemptions = self.steps = 0
        self.busy_seconds = 0.0
        self._prefixes = prefixes
        self._by_priority = {priority: _PriorityRuns() for priority in Priority}
        self._runs: dict[str, EngineRun] = {}
        self.kv_used = 0  # tokens of all that run
        self._context = 0  # of those that decode
        self._decoding = 0
        self._count = 0  # of all that run
        self._numbers = 0
        self._ends: list[tuple[int, int, EngineRun]] = []  # (step of its last token, number, run)
        # Prefill chunks of the open step
        self._step: dict[int, tuple[EngineRun, int]] | None = None
        self._spare = 0
        self._cancelled: list[str] = []

    @property
    def idle(self) -> bool:
        return not self._runs

    @property
    def running(self) -> int:
        return self._count

    @property
    def waiting(self) -> int:
        return len(self._runs) - self._count

    def add(self, fate: SimulatedRequest) -> None:
        assert fate.spec.cost <= self.model.kv_tokens, "it would never fit"
        self._numbers += 1
        run = EngineRun(fate, self._numbers, fate.spec.prompt_tokens)
        self._runs[fate.request_id] = run
        self._by_priority[run.priority].waiting.append(run)

    def cached_prefix_hashes(self) -> list[int]:
        """The marks of what its prefix cache has, least recently used first."""
        return list(self._prefixes.hashes) if self._prefixes else []

    def cancel(self, request_id: str) -> None:
        """Drop a request by the end of the step that runs. Idempotent."""
        if self._step is None:
            self._drop(request_id)
        else:
            self._cancelled.append(request_id)

    def progress(self) -> Iterator[tuple[SimulatedRequest, int]]:
        """The requests in here and the tokens generated for each of them so far."""
        for run in self._runs.values():
            yield run.request, self._generated(run)

    def begin_step(self) -> float | None:
        """Plan a step; the seconds that it takes."""
        assert self._step is None, "a step is still open"
        if not self._runs:
            return None
        self._grow()
        self._spare = self.model.max_batch_tokens - self._decoding
        chunks: dict[int, tuple[EngineRun, int]] = {}
        self._step = chunks
        held_up = False
        for line in self._by_priority.values():
            before = self._spare
            self._continue(line, chunks)
            if not held_up:
                self._admit(line, chunks)
            held_up = held_up or bool(line.waiting)
            if (prefill := before - self._spare) > 0:
                beside = int(LESS_URGENT_SHARE * self.model.max_batch_tokens)
                self._spare = min(self._spare, max(prefill, beside))
        prefill = sum(count for _, count in chunks.values())
        seconds = self.model.step_seconds(self._decoding, self._context, prefill)
        self.busy_seconds += seconds
        return seconds

    def finish_step(self) -> StepResult:
        """The step is over: its tokens are there."""
        assert self._step is not None, "no step is open"
        chunks, self._step = self._step, None
        self.steps += 1
        self.generated_tokens += self._decoding
        self.kv_used += self._decoding
        self._context += self._decoding
        stepped = StepResult()
        self._finish(stepped)
        for run, count in chunks.values():
            self._computed(run, count, stepped)
        while self._cancelled:
            self._drop(self._cancelled.pop())
        return stepped

    # Within a step

    def _grow(self) -> None:
        """Room for a token of each that decodes; the newest of the lowest priority gives way."""
        while self.kv_used + self._decoding > self.model.kv_tokens:
            self._preempt(self._newest())

    def _continue(self, line: _PriorityRuns, chunks: dict[int, tuple[EngineRun, int]]) -> None:
        for run in list(line.prefilling.values()):
            if run.number in line.prefilling:
                self._chunk(run, chunks)

    def _admit(self, line: _PriorityRuns, chunks: dict[int, tuple[EngineRun, int]]) -> None:
        while line.waiting and self._spare > 0 and self._make_room(line.waiting[0]):
            run = line.waiting.popleft()
            line.running[run.number] = line.prefilling[run.number] = run
            self._count += 1
            self._restore(run)
            self._chunk(run, chunks)

    def _restore(self, run: EngineRun) -> None:
        """Find the start of a prompt in the prefix cache; its last token is computed anyhow."""
        if self._prefixes is None:
            return
        asked = run.request.spec
        hit = min(self._prefixes.match_tokens(asked.blocks), asked.prompt_tokens - 1)
        if not run.request.computed:
            run.request.hit_tokens = hit
        self._use(run, hit)
        run.pending -= hit

    def _chunk(self, run: EngineRun, chunks: dict[int, tuple[EngineRun, int]]) -> None:
        count = min(run.pending, self._spare)
        if count <= 0:
            return
        while self.kv_used + self._decoding + count > self.model.kv_tokens:
            newest = self._newest()
            self._preempt(newest)
            if newest is run:
                return
        chunks[run.number] = run, count
        self._use(run, count)
        self._spare -= count

    def _use(self, run: EngineRun, tokens: int) -> None:
        run.computed_tokens += tokens
        self.kv_used += tokens

    def _make_room(self, run: EngineRun) -> bool:
        """Whether a run that waits may begin, once lower priorities have given way if need be."""
        model = self.model
        whole = run.pending + 1
        below = self._below(run.priority)
        reserve = RETURN_STEPS * (self._count - len(below)) if run.was_preempted else 0
        if self._free + sum(map(self._held, below)) < whole + reserve:
            return False
        if self._count - len(below) >= model.max_sequences:
            return False
        while self._count >= model.max_sequences or whole > self._free:
            self._preempt(below.pop())
        return True

    @property
    def _free(self) -> int:
        """KV tokens, once each that decodes has got its next."""
        return self.model.kv_tokens - self.kv_used - self._decoding

    def _below(self, priority: Priority) -> list[EngineRun]:
        """The running runs of lower priorities; who gives way first is last."""
        order = list(Priority)
        lower = order[order.index(priority) + 1 :]
        return [run for p in lower for run in self._by_priority[p].running.values()]

    def _newest(self) -> EngineRun:
        lines = reversed(self._by_priority.values())
        return next(next(reversed(line.running.values())) for line in lines if line.running)

    def _held(self, run: EngineRun) -> int:
        """KV tokens of a run."""
        return run.computed_tokens + (self.steps - run.since if run.decoding else 0)

    def _generated(self, run: EngineRun) -> int:
        return run.request.generated + (self.steps - run.since if run.decoding else 0)

    def _stop(self, run: EngineRun) -> None:
        """Take a run out of the batch, and its KV from it; what it has generated is kept."""
        held = self._held(run)
        line = self._by_priority[run.priority]
        del line.running[run.number]
        line.prefilling.pop(run.number, None)
        self._count -= 1
        self.kv_used -= held
        if run.decoding:
            self._decoding -= 1
            self._context -= held
            run.request.generated += self.steps - run.since
            run.request.computed += self.steps - run.since
        run.decoding, run.computed_tokens = False, 0

    def _preempt(self, run: EngineRun) -> None:
        self._stop(run)
        run.pending = run.request.spec.prompt_tokens + run.request.generated
        if self._step and (chunk := self._step.pop(run.number, None)):
            self._spare += chunk[1]
        run.was_preempted = True
        self._by_priority[run.priority].waiting.appendleft(run)
        self.preemptions += 1

    # At a step's end

    def _computed(self, run: EngineRun, count: int, stepped: StepResult) -> None:
        run.pending -= count
        run.request.computed += count
        self.prompt_tokens += 0 if run.was_preempted else count
        if run.pending:
            return
        asked = run.request.spec
        if self._prefixes is not None:
            self._prefixes.insert(asked.blocks)
        del self._by_priority[run.priority].prefilling[run.number]
        if run.request.generated == 0:
            stepped.first.append(run.request)
        run.request.generated += 1
        self.generated_tokens += 1
        run.decoding, run.since = True, self.steps
        self._decoding += 1
        self._context += run.computed_tokens
        last = self.steps + asked.output_tokens - run.request.generated
        heapq.heappush(self._ends, (last, run.number, run))
        if last == self.steps:
            self._finish(stepped)

    def _finish(self, stepped: StepResult) -> None:
        while self._ends and self._ends[0][0] <= self.steps:
            run = heapq.heappop(self._ends)[2]
            whole = run.request.spec.output_tokens
            if not run.is_removed and run.decoding and self._generated(run) == whole:
                self._leave(run)
                stepped.ended.append(run.request)

    def _leave(self, run: EngineRun) -> None:
        self._stop(run)
        run.is_removed = True
        del self._runs[run.request.request_id]

    def _drop(self, request_id: str) -> None:
        run = self._runs.get(request_id)
        if run is None:
            return
        line = self._by_priority[run.priority]
        if run.number in line.running:
            self._leave(run)
        else:
            line.waiting.remove(run)
            run.is_removed = True
            del self._runs[request_id]
