"""Memory that runs out makes steps smaller, what fits is measured, what is closed is given back."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpu_worker.engines import device_memory
from gpu_worker.engines.engine import DeviceLost, DoesNotFit
from gpu_worker.engines.engine_stats import EngineStats
from gpu_worker.engines.paged.batch import scheduler
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.engine_loader import load
from gpu_worker.engines.paged.model_loader import inspect_model
from tests.engine.tiny_models import expected, greedy_sequence, model, prompt, run_to_end, tokenizer

COUNT = 12
CPU = torch.device("cpu")


class _Small(nn.Module):
    """An embedding on a device whose memory holds a step of so many tokens."""

    def __init__(self, inner: nn.Module, tokens: int, error: Callable[[], Exception]) -> None:
        super().__init__()
        self.inner, self.tokens, self.error = inner, tokens, error
        self.failures = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.numel() > self.tokens:
            self.failures += 1
            raise self.error()
        out: torch.Tensor = self.inner(ids)
        return out


def _cpu_error() -> Exception:
    """What torch raises when a CPU's memory is full."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    return raised.value


def _small(
    tokens: int, error: Callable[[], Exception] = _cpu_error
) -> tuple[TransformersEngine, _Small]:
    made = model("llama")
    small = _Small(made.get_input_embeddings(), tokens, error)
    loaded = inspect_model(made, tokenizer())
    made.set_input_embeddings(small)
    return TransformersEngine(loaded, 8, 256, 2048), small


@pytest.mark.parametrize("error", [_cpu_error, torch.OutOfMemoryError, MemoryError])
def test_a_step_that_does_not_fit_is_made_of_smaller_ones(error: Callable[[], Exception]) -> None:
    """Nobody fails, and everybody gets what it would have got."""
    engine, small = _small(20, error)
    sequences = [greedy_sequence(f"r{n}", prompt(n, 40), COUNT) for n in range(8)]
    results = run_to_end(engine, sequences, every=2)
    assert small.failures > 0
    for sequence in sequences:
        want = expected("llama", sequence.prompt, COUNT)
        assert results.tokens[sequence.request_id] == want
    assert engine.stats.kv_used == 0


def test_sequences_that_do_not_fit_together_give_way_and_are_not_announced() -> None:
    """Three decode at a time here, though eight were promised: credit must say so."""
    engine, small = _small(3)
    sequences = [greedy_sequence(f"r{n}", prompt(n, 2), COUNT) for n in range(8)]
    for sequence in sequences:
        engine.add(sequence)
    while not small.failures:
        engine.step()
    assert engine.free_capacity().sequences == 0
    results = run_to_end(engine, [])
    assert {len(tokens) for tokens in results.tokens.values()} == {COUNT}
    assert engine.free_capacity().sequences < 8


def test_the_room_is_whole_again_after_enough_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may have had the memory for a while."""
    monkeypatch.setattr(scheduler, "RECOVERY_STEPS", 2)
    engine, small = _small(2)
    run_to_end(engine, [greedy_sequence(f"r{n}", prompt(n, 2), 4) for n in range(8)])
    assert engine.free_capacity().sequences < 8
    small.tokens = 1000
    run_to_end(engine, [greedy_sequence("a", prompt(1, 2), 60)])
    assert engine.free_capacity().sequences == 8


def test_only_what_does_not_fit_alone_fails() -> None:
    """A token at a time is the least that can be tried."""
    engine, small = _small(2)
    small.tokens = 0
    results = run_to_end(engine, [greedy_sequence("a", prompt(1, 5), 4)])
    error = results.terminals["a"].error
    assert error is not None
    assert error.code == "engine_failed"
    assert "out of memory with one token" in str(error)
    assert engine.idle


def test_a_lost_device_is_not_blamed_on_a_sequence() -> None:
    """After a fault in a kernel every call fails: the process has to begin anew."""
    engine, _ = _small(2, lambda: torch.AcceleratorError("CUDA error: an illegal memory access"))
    engine.add(greedy_sequence("a", prompt(1, 5), 4))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        engine.step()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    model("llama").save_pretrained(path)
    tokenizer().save(str(path / "tokenizer.json"))
    return path


def test_kv_takes_what_weights_and_a_step_leave(directory: Path) -> None:
    """Measured, not guessed: all of it together is no more than was given."""
    each = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, their size, bytes
    given = 256 << 20
    engine = load(directory, max_sequences=2048, max_batch_tokens=2049, memory_bytes=given)
    assert 2049 <= engine.free_capacity().tokens < given // each
    assert engine.stats == EngineStats(kv_free=engine.stats.kv_free), "a warm-up counts for nothing"


def test_what_adapters_may_take_is_not_kv(directory: Path) -> None:
    """They come later, and must not find the memory full."""
    each = 3 * 2 * 2 * 16 * 4
    given, adapters = 256 << 20, 100 << 20
    many: Any = {"max_sequences": 2048, "max_batch_tokens": 2049, "memory_bytes": given}
    engine = load(directory, **many, adapter_bytes=adapters)
    assert engine.free_capacity().tokens < (given - adapters) // each
    assert load(directory, **many).free_capacity().tokens > engine.free_capacity().tokens


def test_a_model_whose_kv_does_not_fit_is_refused_with_numbers(directory: Path) -> None:
    """It could answer nothing."""
    with pytest.raises(DoesNotFit, match="room for 0 tokens of KV in 100,000 bytes"):
        load(directory, memory_bytes=100_000)


def test_adapters_that_leave_no_room_for_kv_are_named(directory: Path) -> None:
    """More memory is not the only way out."""
    whole = 256 << 20
    with pytest.raises(DoesNotFit, match=r"268,435,456 bytes for adapters .*--adapter-bytes"):
        load(directory, memory_bytes=whole, adapter_bytes=whole)


def test_the_peak_of_a_computation_is_what_it_held_at_once() -> None:
    """Twice the same buffer is not twice the memory."""
    size = 64 << 20

    def work() -> None:
        for _ in range(3):
            torch.ones(size, dtype=torch.uint8)

    assert (
        0.9 * size <= device_memory.measure_peak_bytes(CPU, work) < 1.9 * size
    )  # the kernel counts roughly


def test_a_closed_engine_lets_go_of_its_model() -> None:
    """Another model is to have the memory, whoever still knows the engine."""
    engine, small = _small(1000)
    weights = weakref.ref(small)
    del small
    run_to_end(engine, [greedy_sequence("a", prompt(1, 5), 4)])
    engine.close()
    assert weights() is None
