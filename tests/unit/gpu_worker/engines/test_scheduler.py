"""The scheduler keeps its budgets and its order, and everybody ends."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu_worker.engines.paged.batch.scheduler as scheduler_module
from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS, NULL_BLOCK, blocks_for
from gpu_worker.engines.paged.batch.kv_cache_manager import KvCacheManager, pool_sizes
from gpu_worker.engines.paged.batch.scheduler import Scheduler
from gpu_worker.engines.paged.batch.sequence_state import (
    SequenceSlice,
    SequenceState,
    SlidingWindow,
    first_visible_position,
)
from streams.subjects import Priority

BLOCKS = 8
INTERACTIVE, STANDARD, BATCH = Priority


@dataclass
class Job:
    """A prompt to run, how many tokens it generates, and after how many steps it arrives."""

    prompt: list[int]
    count: int
    arrival: int
    priority: Priority
    cancel_after: int | None = None


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=BLOCKS * BLOCK_TOKENS // 2)
JOBS = st.lists(
    st.builds(
        Job,
        PROMPTS,
        st.integers(1, BLOCKS * BLOCK_TOKENS // 2),
        st.integers(0, 30),
        st.sampled_from(Priority),
        st.none() | st.integers(0, 20),
    ),
    min_size=1,
    max_size=8,
)


class Simulation:
    """An engine without a model: a step's tokens are computed by pretending."""

    def __init__(
        self, sequences: int, spare: int, prefix_cache: bool, windows: set[SlidingWindow]
    ) -> None:
        self.sequences, self.tokens = sequences, sequences + spare
        self.sizes = pool_sizes(windows, BLOCKS * BLOCK_TOKENS, sequences, self.tokens)
        self.cache = KvCacheManager(self.sizes, self.tokens, prefix_cache)
        self.scheduler = Scheduler(self.cache, sequences, self.tokens)
        self.wanted: dict[str, int] = {}
        self.started: list[SequenceState] = []
        self.finished: set[str] = set()

    def add(self, number: int, job: Job) -> SequenceState:
        run = SequenceState(f"{number:03}", list(job.prompt), priority=job.priority)
        self.wanted[run.request_id] = len(job.prompt) + job.count
        self.scheduler.add(run)
        return run

    def step(self) -> list[SequenceSlice]:
        before = self.scheduler.running
        first = [*before, *self.scheduler.waiting]
        slices = self.scheduler.schedule()
        self._check(slices)
        self._check_order(before)
        if first:
            top = min(first, key=lambda run: (_urgency(run), run.request_id))
            assert top in [s.state for s in slices], "the first of all makes no progress"
        self.scheduler.commit(slices)
        for piece in slices:
            self._advance(piece)
        return slices

    def end(self, run: SequenceState) -> None:
        self.scheduler.remove(run)
        self.finished.add(run.request_id)

    def _check(self, slices: list[SequenceSlice]) -> None:
        assert sum(s.count for s in slices) <= self.scheduler.token_budget <= self.tokens
        assert len(self.scheduler.running) <= self.sequences
        assert len({id(s.state) for s in slices}) == len(slices)
        for piece in slices:
            assert piece.count > 0
            assert piece.start == piece.state.computed_tokens
            assert piece.end <= len(piece.state.tokens)
            self._check_tables(piece)
        for window, pool in self.cache.pools.items():
            held = {
                b for run in self.scheduler.running for b in run.block_tables[window].held_blocks
            }
            assert len(held) + pool.available == pool.count == self.sizes[window]
        assert not any(run.block_tables for run in self.scheduler.waiting)

    def _check_tables(self, piece: SequenceSlice) -> None:
        """What the tokens of a step see has its blocks, and little more."""
        for window, table in piece.state.block_tables.items():
            first = first_visible_position(piece.start, window) // BLOCK_TOKENS
            seen = table.blocks[first : blocks_for(piece.end)]
            assert len(seen) == blocks_for(piece.end) - first
            assert table.first_held == first
            assert NULL_BLOCK not in table.held_blocks
            assert set(table.blocks[:first]) <= {NULL_BLOCK}

    def _check_order(self, before: list[SequenceState]) -> None:
        """Within a priority by arrival; nobody begins, or stays, before who is more urgent."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        for priority in Priority:
            order = [r.request_id for r in [*running, *waiting] if r.priority is priority]
            assert order == sorted(order)
        begun = [_urgency(run) for run in running if run not in before]
        gave_way = [_urgency(run) for run in waiting if run in before]
        assert max(begun, default=0) <= min(map(_urgency, waiting), default=len(Priority))
        assert max(map(_urgency, running), default=0) <= min(gave_way, default=len(Priority))

    def _advance(self, piece: SequenceSlice) -> None:
        run = piece.state
        if run not in self.started:
            self.started.append(run)
        if piece.is_sampled:
            run.tokens.append(0)
            if len(run.tokens) >= self.wanted[run.request_id]:
                self.end(run)


SIMULATIONS = st.builds(
    Simulation,
    st.integers(1, 6),
    st.integers(1, 40),
    st.booleans(),
    st.sets(st.sampled_from([None, 1, 16, 20, 40]), min_size=1),
)


def _urgency(run: SequenceState) -> int:
    """0 is the most urgent."""
    return list(Priority).index(run.priority)


@given(SIMULATIONS, JOBS)
def test_every_run_ends_within_the_budgets_in_the_order_of_arrival(
    simulation: Simulation, jobs: list[Job]
) -> None:
    """No starvation, no step beyond its tokens, no block used twice, none lost."""
    step = 0
    queue = sorted(enumerate(jobs), key=lambda pair: pair[1].arrival)
    due = [(job.arrival, f"{n:03}", n, job) for n, (_, job) in enumerate(queue)]
    cancels: list[tuple[int, SequenceState]] = []
    while due or len(simulation.finished) < len(simulation.wanted):
        while due and due[0][0] <= step:
            _, _, number, job = due.pop(0)
            run = simulation.add(number, job)
            if job.cancel_after is not None:
                cancels.append((step + job.cancel_after, run))
        for at, run in cancels:
            if at == step and run.request_id not in simulation.finished:
                simulation.end(run)
        if not simulation.step() and not due:
            assert len(simulation.finished) == len(simulation.wanted), "nothing runs"
        step += 1
        assert step < 20_000, "somebody starves"
    for priority in Priority:
        started = [run.request_id for run in simulation.started if run.priority is priority]
        assert started == sorted(started)
    assert simulation.cache.available_blocks == sum(simulation.sizes.values())


def _scheduler(blocks: int = 32, sequences: int = 4, tokens: int = 32) -> Scheduler:
    return Scheduler(KvCacheManager({None: blocks}, tokens), sequences, tokens)


def _complete(scheduler: Scheduler) -> list[SequenceSlice]:
    """One step: each run that can samples a token."""
    slices = scheduler.schedule()
    scheduler.commit(slices)
    for piece in slices:
        if piece.is_sampled:
            piece.state.tokens.append(1)
    return slices


def _names(runs: list[SequenceState]) -> str:
    return "".join(run.request_id for run in runs)


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    """A long prompt must not stall the streams of others: it is cut into chunks."""
    scheduler = _scheduler()
    scheduler.add(SequenceState("a", [1]))
    _complete(scheduler)
    scheduler.add(SequenceState("b", [1] * 70))
    counts = [{s.state.request_id: s.count for s in _complete(scheduler)} for _ in range(3)]
    assert counts == [{"a": 1, "b": 31}, {"a": 1, "b": 31}, {"a": 1, "b": 8}]


def test_the_newest_gives_way_and_returns_first() -> None:
    """The oldest has the most to lose; who gave way is next in the queue."""
    scheduler = _scheduler(blocks=4)
    runs = [SequenceState(name, [ord(name)] * 16) for name in "abc"]
    for run in runs:
        scheduler.add(run)
    _complete(scheduler)
    _complete(scheduler)
    assert [r.request_id for r in scheduler.running] == ["a", "b"]
    assert [r.request_id for r in scheduler.waiting] == ["c"]
    assert scheduler.preemptions == 0
    for _ in range(20):
        _complete(scheduler)
    assert [r.request_id for r in scheduler.running] == ["a"]
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]
    assert scheduler.preemptions == 1


def test_a_more_urgent_run_takes_the_place_of_a_less_urgent_one() -> None:
    """Within one step; the newest of the least urgent gives way, and comes back in its place."""
    scheduler = _scheduler(sequences=3)
    for name, priority in (("a", STANDARD), ("b", BATCH), ("c", BATCH), ("d", BATCH)):
        scheduler.add(SequenceState(name, [1], priority=priority))
    _complete(scheduler)
    assert _names(scheduler.running) == "abc"
    scheduler.add(SequenceState("e", [1], priority=INTERACTIVE))
    scheduler.add(SequenceState("f", [1], priority=STANDARD))
    assert _names([s.state for s in _complete(scheduler)]) == "eaf"
    assert _names(scheduler.waiting) == "bcd"
    assert scheduler.preemptions == 2


def test_blocks_are_taken_from_less_urgent_runs_only() -> None:
    """Its own priority it waits for, and a lower one gives way only where that helps."""
    scheduler = _scheduler(blocks=6, tokens=512)
    scheduler.add(SequenceState("a", [1] * 40, priority=STANDARD))
    scheduler.add(SequenceState("b", [2] * 30, priority=BATCH))
    _complete(scheduler)
    scheduler.add(SequenceState("c", [3] * 50, priority=STANDARD))
    _complete(scheduler)
    assert (_names(scheduler.running), scheduler.preemptions) == ("ab", 0)
    scheduler.add(SequenceState("d", [4] * 40, priority=INTERACTIVE))
    _complete(scheduler)
    assert (_names(scheduler.running), scheduler.preemptions) == ("da", 1)


def test_an_urgent_prompt_is_prefilled_before_an_older_one() -> None:
    """A long prompt of less urgent work would hold up its first token by many steps."""
    scheduler = _scheduler()
    scheduler.add(SequenceState("a", [1] * 100, priority=BATCH))
    _complete(scheduler)
    scheduler.add(SequenceState("b", [2] * 40, priority=INTERACTIVE))
    counts = [{s.state.request_id: s.count for s in _complete(scheduler)} for _ in range(2)]
    assert counts == [{"b": 32}, {"b": 8, "a": 10}]


def test_a_step_with_an_urgent_prompt_has_little_of_the_others() -> None:
    """Its first token waits for the whole step; without it they have all of the step again."""
    scheduler = _scheduler(blocks=32)
    scheduler.add(SequenceState("a", [1] * 200, priority=BATCH))
    scheduler.add(SequenceState("b", [2] * 10, priority=STANDARD))
    scheduler.add(SequenceState("c", [3] * 6, priority=INTERACTIVE))
    counts = [{s.state.request_id: s.count for s in _complete(scheduler)} for _ in range(2)]
    assert counts == [{"c": 6, "b": 10}, {"b": 1, "c": 1, "a": 30}]


@pytest.mark.parametrize(("steps", "returns"), [(0, True), (2 * BLOCK_TOKENS, False)])
def test_who_gave_way_returns_when_the_others_can_go_on(
    steps: int, returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is just room for it, it would be computed only to give way again."""
    monkeypatch.setattr(scheduler_module, "RETURN_STEPS", steps)
    scheduler = _scheduler(blocks=5, tokens=512)
    old, new = SequenceState("old", [1] * 30), SequenceState("new", [2] * 30)
    for run in (old, new):
        scheduler.add(run)
    _complete(scheduler)
    scheduler._preempt(new)
    _complete(scheduler)
    assert (new in scheduler.running) == returns
    scheduler.remove(old)
    _complete(scheduler)
    assert scheduler.running == [new]


def test_a_preempted_run_finds_its_blocks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputing costs little while its blocks are still cached."""
    monkeypatch.setattr(scheduler_module, "RETURN_STEPS", 0)
    scheduler = _scheduler(blocks=8, tokens=512)
    old, new = SequenceState("old", [1] * 40), SequenceState("new", [2] * 40)
    scheduler.add(old)
    scheduler.add(new)
    _complete(scheduler)
    scheduler._preempt(new)
    (piece,) = [s for s in _complete(scheduler) if s.state is new]
    assert piece.start == 32


def test_a_prompt_is_never_served_from_the_cache_alone() -> None:
    """The last token has to be computed: its logits are the point."""
    scheduler = _scheduler(tokens=512)
    first, second = SequenceState("a", [1] * 32), SequenceState("b", [1] * 32)
    scheduler.add(first)
    _complete(scheduler)
    scheduler.add(second)
    (piece,) = [s for s in _complete(scheduler) if s.state is second]
    assert (piece.start, piece.count) == (16, 16)


def test_another_salt_shares_nothing() -> None:
    """The same tokens under another adapter have another KV."""
    scheduler = _scheduler(tokens=512)
    scheduler.add(SequenceState("a", [1] * 32))
    _complete(scheduler)
    scheduler.add(SequenceState("b", [1] * 32, salt=b"adapter"))
    assert [s.start for s in _complete(scheduler)] == [32, 0]


def test_a_budget_without_room_for_prefill_is_refused() -> None:
    """Every running sequence takes a token of each step: prefill would starve."""
    with pytest.raises(ValueError, match="max_batch_tokens 8 must be above max_sequences 8"):
        Scheduler(KvCacheManager({None: 4}, 8), 8, 8)


@given(SIMULATIONS, JOBS, st.lists(st.booleans(), max_size=60))
def test_every_run_ends_though_steps_do_not_fit_the_memory(
    simulation: Simulation, jobs: list[Job], failures: list[bool]
) -> None:
    """A step that failed is not committed; the next is at most half of it, and nothing is lost."""
    for number, job in enumerate(jobs):
        simulation.add(number, job)
    scheduler = simulation.scheduler
    for fails in failures:
        slices = scheduler.schedule()
        tokens = sum(s.count for s in slices)
        if fails and scheduler.halve_budget(slices):
            assert sum(s.count for s in scheduler.schedule()) <= tokens // 2
        simulation.step()
    for _ in range(20_000):
        if len(simulation.finished) == len(jobs):
            break
        simulation.step()
    assert len(simulation.finished) == len(jobs)
    assert simulation.cache.available_blocks == sum(simulation.sizes.values())


def test_a_lowered_budget_lets_the_newest_give_way_and_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half the runs of a step that did not fit; then a little more after many that did."""
    monkeypatch.setattr(scheduler_module, "RECOVERY_STEPS", 2)
    monkeypatch.setattr(scheduler_module, "RETURN_STEPS", 0)
    scheduler = _scheduler(sequences=8)
    for name in "abcdefgh":
        scheduler.add(SequenceState(name, [1]))
    assert scheduler.halve_budget(scheduler.schedule())
    assert scheduler.max_running == 4
    assert [s.state.request_id for s in _complete(scheduler)] == list("abcd")
    assert [r.request_id for r in scheduler.waiting] == list("efgh")
    for _ in range(60):
        _complete(scheduler)
    assert (scheduler.token_budget, len(scheduler.running)) == (32, 8)


def test_a_single_token_cannot_be_halved() -> None:
    """What does not fit alone never will."""
    scheduler = _scheduler()
    scheduler.add(SequenceState("a", [1]))
    assert not scheduler.halve_budget(scheduler.schedule())
