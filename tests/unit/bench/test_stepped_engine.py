"""The engine of live benches: the paged scheduler's decisions at the pace of a step model."""

import pytest

from bench.live.stepped_engine import SteppedEngine
from gpu_worker.engines.engine import Sequence
from simulation.step_model import StepModel
from streams.messages import Sampling
from streams.subjects import Priority

SMALL = StepModel(
    step_ms=100,
    sequence_ms=10,
    context_us=0,
    prefill_ms=50,
    token_ms=1,
    kv_tokens=320,
    max_sequences=8,
    max_batch_tokens=100,
)


class Clock:
    """Time that passes when the engine sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def sequence(name: str, prompt: int, output: int, priority: Priority) -> Sequence:
    return Sequence(name, [1] * prompt, Sampling(output), priority=priority)


def run(*sequences: Sequence) -> dict[str, list[float]]:
    """When the tokens of each came, in milliseconds."""
    clock = Clock()
    engine = SteppedEngine(SMALL, clock, clock.sleep)
    for each in sequences:
        engine.add(each)
    times: dict[str, list[float]] = {each.request_id: [] for each in sequences}
    while not engine.idle:
        for output in engine.step():
            times[output.request_id] += [clock.now * 1000] * len(output.tokens)
    return times


def test_tokens_come_when_the_model_says() -> None:
    """60 + 40 tokens of prompts; one decodes beside the other 40; then two decode together."""
    standard = Priority.STANDARD
    times = run(sequence("a", 60, 3, standard), sequence("b", 80, 2, standard))
    assert times["a"] == pytest.approx([150, 350, 470])
    assert times["b"] == pytest.approx([350, 470])


def test_who_is_less_urgent_gives_way_and_loses_no_token() -> None:
    """Where the KV does not hold both, as on a GPU."""
    batch = sequence("batch", 96, 100, Priority.BATCH)
    urgent = sequence("urgent", 96, 100, Priority.INTERACTIVE)
    times = run(batch, urgent)
    assert len(times["batch"]) == len(times["urgent"]) == 100
    assert times["urgent"][-1] < times["batch"][-1]
