"""Simulated engine: continuous batching, chunked prefill, paged KV and priorities, without a GPU.

It schedules as `gpu_worker/engines/paged/batch/scheduler.py` does (see docs/engine-design.md), but
only counts tokens where that one stores them, so that simulating a step costs the same however many
sequences decode in it. A thousand sequences can therefore run beside each other on one core.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from simulation.prefix_cache import PrefixCacheModel
from simulation.request import SimulatedRequest
from simulation.step_model import StepModel
from streams.subjects import Priority

# Equal to those of gpu_worker/engines/paged/batch/scheduler.py, as a test asserts.
LESS_URGENT_SHARE = 1 / 3
RETURN_STEPS = 64


@dataclass(slots=True, eq=False)
class EngineRun:
    """One request in the simulated engine: waiting, prefilling or decoding.

    `pending` is the number of tokens whose KV must be computed before the request decodes, or
    decodes again after a preemption.
    """

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
        """The priority at which the engine schedules the request."""
        return self.request.priority


@dataclass
class StepResult:
    """Outcome of one step: the requests that got their first token in it, and those that ended."""

    first: list[SimulatedRequest] = field(default_factory=list)
    ended: list[SimulatedRequest] = field(default_factory=list)


@dataclass
class _PriorityRuns:
    """The runs of one priority, oldest first; `prefilling` is a part of `running`."""

    running: dict[int, EngineRun] = field(default_factory=dict)  # by number, in order of admission
    prefilling: dict[int, EngineRun] = field(default_factory=dict)
    waiting: deque[EngineRun] = field(default_factory=deque)


class SimulatedEngine:
    """Engine with continuous batching that only counts tokens; it has no clock of its own.

    The owner calls `begin_step` for the seconds that the next step takes, or None if there is
    nothing to do, and `finish_step` when that time has passed. A request that is added between the
    two waits for the next step; one that is cancelled between them is removed by `finish_step`.
    """

    def __init__(self, model: StepModel, prefixes: PrefixCacheModel | None = None) -> None:
        self.model = model
        self.prompt_tokens = self.generated_tokens = self.preemptions = self.steps = 0
        self.busy_seconds = 0.0
        self._prefixes = prefixes
        self._by_priority = {priority: _PriorityRuns() for priority in Priority}
        self._runs: dict[str, EngineRun] = {}
        self.kv_used = 0  # tokens of all running requests
        self._context = 0  # KV tokens of the decoding runs
        self._decoding = 0  # number of decoding runs
        self._count = 0  # number of running requests
        self._last_number = 0
        self._ends: list[tuple[int, int, EngineRun]] = []  # (step of its last token, number, run)
        # Prefill chunks of the open step by the run's number: the run and its tokens
        self._open_step: dict[int, tuple[EngineRun, int]] | None = None
        self._spare = 0  # tokens that the open step can still take
        self._cancelled: list[str] = []

    @property
    def idle(self) -> bool:
        """True while the engine has no requests, neither running nor waiting."""
        return not self._runs

    @property
    def running(self) -> int:
        """The number of requests in the batch, prefilling or decoding."""
        return self._count

    @property
    def waiting(self) -> int:
        """The number of requests that are not in the batch, preempted ones included."""
        return len(self._runs) - self._count

    def add(self, request: SimulatedRequest) -> None:
        """Queue a request, which waits for one of the next steps.

        Its cost (prompt and reserved output) must fit into the engine's KV; AssertionError
        otherwise.
        """
        assert request.spec.cost <= self.model.kv_tokens, "it would never fit"
        self._last_number += 1
        run = EngineRun(request, self._last_number, request.spec.prompt_tokens)
        self._runs[request.request_id] = run
        self._by_priority[run.priority].waiting.append(run)

    def cached_prefix_hashes(self) -> list[int]:
        """Return the hashes of all prompt prefixes in the prefix cache, least recently used first.

        The list is empty without a prefix cache.
        """
        return list(self._prefixes.hashes) if self._prefixes else []

    def cancel(self, request_id: str) -> None:
        """Remove a request: now, or in `finish_step` if a step is open. Ignores unknown ids."""
        if self._open_step is None:
            self._remove(request_id)
        else:
            self._cancelled.append(request_id)

    def progress(self) -> Iterator[tuple[SimulatedRequest, int]]:
        """Yield each request, running or waiting, and the tokens generated for it so far."""
        for run in self._runs.values():
            yield run.request, self._generated(run)

    def begin_step(self) -> float | None:
        """Plan a step and return its duration in seconds; None if the engine has no requests.

        After a number, call `finish_step` before the next `begin_step`.
        """
        assert self._open_step is None, "a step is still open"
        if not self._runs:
            return None
        self._make_decode_room()
        self._spare = self.model.max_batch_tokens - self._decoding
        chunks: dict[int, tuple[EngineRun, int]] = {}
        self._open_step = chunks
        is_blocked = False  # a more urgent run waits, so no less urgent one is admitted
        for runs in self._by_priority.values():
            before = self._spare
            self._continue_prefills(runs, chunks)
            if not is_blocked:
                self._admit(runs, chunks)
            is_blocked = is_blocked or bool(runs.waiting)
            if (prefill := before - self._spare) > 0:
                less_urgent = int(LESS_URGENT_SHARE * self.model.max_batch_tokens)
                self._spare = min(self._spare, max(prefill, less_urgent))
        prefill = sum(count for _, count in chunks.values())
        seconds = self.model.step_seconds(self._decoding, self._context, prefill)
        self.busy_seconds += seconds
        return seconds

    def finish_step(self) -> StepResult:
        """Finish the step that `begin_step` opened, and return its outcome.

        Call this when the step's seconds have passed; without an open step it raises
        AssertionError.
        """
        assert self._open_step is not None, "no step is open"
        chunks, self._open_step = self._open_step, None
        self.steps += 1
        self.generated_tokens += self._decoding
        self.kv_used += self._decoding
        self._context += self._decoding
        result = StepResult()
        self._end_finished(result)
        for run, count in chunks.values():
            self._finish_chunk(run, count, result)
        while self._cancelled:
            self._remove(self._cancelled.pop())
        return result

    # Within a step

    def _make_decode_room(self) -> None:
        """Make room in the KV for one token of each decoding run.

        Preempts the newest run of the lowest priority, as often as needed.
        """
        while self.kv_used + self._decoding > self.model.kv_tokens:
            self._preempt(self._newest_run())

    def _continue_prefills(
        self, runs: _PriorityRuns, chunks: dict[int, tuple[EngineRun, int]]
    ) -> None:
        for run in list(runs.prefilling.values()):
            if run.number in runs.prefilling:
                self._schedule_chunk(run, chunks)

    def _admit(self, runs: _PriorityRuns, chunks: dict[int, tuple[EngineRun, int]]) -> None:
        while runs.waiting and self._spare > 0 and self._make_room(runs.waiting[0]):
            run = runs.waiting.popleft()
            runs.running[run.number] = runs.prefilling[run.number] = run
            self._count += 1
            self._restore_prefix(run)
            self._schedule_chunk(run, chunks)

    def _restore_prefix(self, run: EngineRun) -> None:
        """Reuse the start of a prompt from the prefix cache; its last token is always computed."""
        if self._prefixes is None:
            return
        spec = run.request.spec
        hit = min(self._prefixes.match_tokens(spec.blocks), spec.prompt_tokens - 1)
        if not run.request.computed:
            run.request.hit_tokens = hit
        self._add_kv(run, hit)
        run.pending -= hit

    def _schedule_chunk(self, run: EngineRun, chunks: dict[int, tuple[EngineRun, int]]) -> None:
        count = min(run.pending, self._spare)
        if count <= 0:
            return
        while self.kv_used + self._decoding + count > self.model.kv_tokens:
            newest = self._newest_run()
            self._preempt(newest)
            if newest is run:
                return
        chunks[run.number] = run, count
        self._add_kv(run, count)
        self._spare -= count

    def _add_kv(self, run: EngineRun, tokens: int) -> None:
        run.computed_tokens += tokens
        self.kv_used += tokens

    def _make_room(self, run: EngineRun) -> bool:
        """Return whether a waiting run may begin; preempts lower priorities for it if needed."""
        model = self.model
        needed = run.pending + 1
        below = self._less_urgent_runs(run.priority)
        reserve = RETURN_STEPS * (self._count - len(below)) if run.was_preempted else 0
        if self._free_kv + sum(map(self._held_kv, below)) < needed + reserve:
            return False
        if self._count - len(below) >= model.max_sequences:
            return False
        while self._count >= model.max_sequences or needed > self._free_kv:
            self._preempt(below.pop())
        return True

    @property
    def _free_kv(self) -> int:
        """Free KV tokens, once each decoding run has its next token."""
        return self.model.kv_tokens - self.kv_used - self._decoding

    def _less_urgent_runs(self, priority: Priority) -> list[EngineRun]:
        """Return the running runs of lower priorities; the last one is to be preempted first."""
        order = list(Priority)
        lower = order[order.index(priority) + 1 :]
        return [run for p in lower for run in self._by_priority[p].running.values()]

    def _newest_run(self) -> EngineRun:
        least_urgent_first = reversed(self._by_priority.values())
        return next(
            next(reversed(runs.running.values())) for runs in least_urgent_first if runs.running
        )

    def _held_kv(self, run: EngineRun) -> int:
        """Return the KV tokens that a run holds."""
        return run.computed_tokens + (self.steps - run.since if run.decoding else 0)

    def _generated(self, run: EngineRun) -> int:
        return run.request.generated + (self.steps - run.since if run.decoding else 0)

    def _unschedule(self, run: EngineRun) -> None:
        """Take a run out of the batch and free its KV; its generated tokens are kept."""
        held = self._held_kv(run)
        runs = self._by_priority[run.priority]
        del runs.running[run.number]
        runs.prefilling.pop(run.number, None)
        self._count -= 1
        self.kv_used -= held
        if run.decoding:
            self._decoding -= 1
            self._context -= held
            run.request.generated += self.steps - run.since
            run.request.computed += self.steps - run.since
        run.decoding, run.computed_tokens = False, 0

    def _preempt(self, run: EngineRun) -> None:
        self._unschedule(run)
        run.pending = run.request.spec.prompt_tokens + run.request.generated
        if self._open_step and (chunk := self._open_step.pop(run.number, None)):
            self._spare += chunk[1]
        run.was_preempted = True
        self._by_priority[run.priority].waiting.appendleft(run)
        self.preemptions += 1

    # At a step's end

    def _finish_chunk(self, run: EngineRun, count: int, result: StepResult) -> None:
        run.pending -= count
        run.request.computed += count
        self.prompt_tokens += 0 if run.was_preempted else count
        if run.pending:
            return
        spec = run.request.spec
        if self._prefixes is not None:
            self._prefixes.insert(spec.blocks)
        del self._by_priority[run.priority].prefilling[run.number]
        if run.request.generated == 0:
            result.first.append(run.request)
        run.request.generated += 1
        self.generated_tokens += 1
        run.decoding, run.since = True, self.steps
        self._decoding += 1
        self._context += run.computed_tokens
        last = self.steps + spec.output_tokens - run.request.generated
        heapq.heappush(self._ends, (last, run.number, run))
        if last == self.steps:
            self._end_finished(result)

    def _end_finished(self, result: StepResult) -> None:
        while self._ends and self._ends[0][0] <= self.steps:
            run = heapq.heappop(self._ends)[2]
            output_tokens = run.request.spec.output_tokens
            if not run.is_removed and run.decoding and self._generated(run) == output_tokens:
                self._remove_running(run)
                result.ended.append(run.request)

    def _remove_running(self, run: EngineRun) -> None:
        self._unschedule(run)
        run.is_removed = True
        del self._runs[run.request.request_id]

    def _remove(self, request_id: str) -> None:
        run = self._runs.get(request_id)
        if run is None:
            return
        runs = self._by_priority[run.priority]
        if run.number in runs.running:
            self._remove_running(run)
        else:
            runs.waiting.remove(run)
            run.is_removed = True
            del self._runs[request_id]
