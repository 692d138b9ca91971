"""What is wrong with one sequence is nobody else's trouble."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpu_worker.engines.engine import EngineError, Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model_loader import inspect_model
from streams.messages import Sampling
from tests.engine.tiny_models import (
    CONTEXT,
    VOCABULARY,
    Results,
    engine,
    expected,
    greedy_sequence,
    model,
    prompt,
    run_to_end,
    tokenizer,
)

COUNT = 12


def _healthy() -> list[Sequence]:
    return [greedy_sequence(f"r{n}", prompt(n, 30), COUNT) for n in range(3)]


def _poison() -> int:
    """A token that no healthy sequence holds."""
    held = {t for s in _healthy() for t in s.prompt + expected("llama", s.prompt, COUNT)}
    return next(t for t in range(3, VOCABULARY) if t not in held)


POISON = _poison()


def _assert_unharmed(results: Results) -> None:
    for sequence in _healthy():
        want = expected("llama", sequence.prompt, COUNT)
        assert results.tokens[sequence.request_id] == want


def _error(results: Results, request_id: str) -> EngineError:
    error = results.terminals[request_id].error
    assert error is not None
    return error


@pytest.mark.parametrize(
    ("culprit", "code"),
    [
        (greedy_sequence("bad", [5, VOCABULARY], 4), "token_out_of_range"),
        (greedy_sequence("bad", [-1], 4), "token_out_of_range"),
        (Sequence("bad", [5], Sampling(4), generated=[900]), "token_out_of_range"),
        (greedy_sequence("bad", [5] * CONTEXT, 1), "context_length_exceeded"),
        (greedy_sequence("bad", [5], CONTEXT), "context_length_exceeded"),
        (greedy_sequence("bad", [], 4), "unsupported_value"),
    ],
)
def test_what_cannot_run_fails_before_it_joins_a_batch(culprit: Sequence, code: str) -> None:
    """In a batch it would take the others down, or write beyond the pool."""
    first, *rest = _healthy()
    results = run_to_end(engine(), [first, culprit, *rest])
    assert _error(results, "bad").code == code
    _assert_unharmed(results)


def test_more_than_the_pool_is_refused() -> None:
    """It could never finish, even alone."""
    results = run_to_end(engine(kv_tokens=64), [greedy_sequence("bad", prompt(1, 60), 8)])
    assert _error(results, "bad").code == "context_length_exceeded"


class _Fragile(nn.Module):
    """An embedding that breaks on one token, as a fault in a kernel would."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if bool((ids == POISON).any()):
            raise RuntimeError("a kernel does not like this")
        out: torch.Tensor = self.inner(ids)
        return out


def _fragile() -> TransformersEngine:
    made = model("llama")
    made.set_input_embeddings(_Fragile(made.get_input_embeddings()))
    return TransformersEngine(inspect_model(made, tokenizer()), 8, 512, 2048)


def _poisonous(kv_tokens: int = 2048) -> TransformersEngine:
    """One token's embedding is NaN, which spreads to the logits of those that hold it."""
    made = model("llama")
    made.get_input_embeddings().weight.data[POISON] = torch.nan  # type: ignore[operator]
    return TransformersEngine(inspect_model(made, tokenizer()), 8, 512, kv_tokens)


@pytest.mark.parametrize("make", [_fragile, _poisonous])
@pytest.mark.parametrize("every", [0, 2])
def test_only_the_culprit_of_a_failing_step_fails(
    make: Callable[[], TransformersEngine], every: int
) -> None:
    """The step is computed again, one sequence at a time; NaN stays in its own row."""
    culprit = greedy_sequence("bad", [5] * 20 + [POISON, 6], COUNT)
    first, *rest = _healthy()
    results = run_to_end(make(), [first, culprit, *rest], every)
    assert _error(results, "bad").code == "engine_failed"
    _assert_unharmed(results)


def test_blocks_of_a_failed_sequence_do_not_poison_their_next_owner() -> None:
    """A masked NaN is still a NaN: blocks are cleared, and leave the prefix cache."""
    made = _poisonous(kv_tokens=128)
    shared = _healthy()[0].prompt
    run_to_end(made, [greedy_sequence(f"bad{n}", shared + [POISON] * 30, COUNT) for n in range(8)])
    for sequence in _healthy():
        alone = run_to_end(made, [sequence])
        assert alone.tokens[sequence.request_id] == expected("llama", sequence.prompt, COUNT)


def test_cancel_ends_a_sequence_by_the_next_step() -> None:
    """Waiting, in prefill or decoding: what was generated is kept, and the rest is unharmed."""
    made = engine(max_batch_tokens=20, max_sequences=3)
    for sequence in [*_healthy(), greedy_sequence("early", prompt(8, 40), COUNT)]:
        made.add(sequence)
    made.add(greedy_sequence("late", prompt(9, 40), COUNT))
    results = Results()
    made.cancel("late")
    results.add(made.step())
    made.cancel("early")
    made.cancel("early")
    made.cancel("nobody")
    while not made.idle:
        results.add(made.step())
    assert results.terminals["late"].finish == results.terminals["early"].finish == "cancelled"
    _assert_unharmed(results)
    assert made.stats.kv_used == 0


def test_a_cancelled_sequence_is_out_of_the_room_at_once() -> None:
    """Credit for its place is good before the next step."""
    made = engine()
    before = made.free_capacity()
    made.add(greedy_sequence("a", prompt(1, 40), COUNT))
    held = made.free_capacity()
    made.cancel("a")
    assert (held.sequences, held.tokens) == (before.sequences - 1, before.tokens - 64)
    assert made.free_capacity() == before


def test_an_identifier_is_free_again_after_its_cancel() -> None:
    """The same request may come back as a new attempt."""
    made = engine()
    made.add(greedy_sequence("a", prompt(1, 40), COUNT))
    made.cancel("a")
    made.add(greedy_sequence("a", prompt(1, 40), COUNT))
    outputs = [output for _ in range(40) for output in made.step()]
    assert [o.finish for o in outputs if o.finish] == ["cancelled", "length"]


def test_a_failure_of_every_sequence_leaves_a_working_engine() -> None:
    """`step` reports and does not raise."""
    made = _fragile()
    results = run_to_end(made, [greedy_sequence(f"bad{n}", [POISON], 4) for n in range(3)])
    assert {_error(results, f"bad{n}").code for n in range(3)} == {"engine_failed"}
    _assert_unharmed(run_to_end(made, _healthy()))
