"""Unary models keep to the memory that they may take, or are refused with the numbers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker.engines import device_memory
from gpu_worker.engines import engine as engine_api
from gpu_worker.engines.engine import DoesNotFit
from gpu_worker.engines.unary import batch_memory
from gpu_worker.engines.unary.classify import ClassifyEngine
from gpu_worker.engines.unary.embed import EmbedEngine
from gpu_worker.engines.unary.engine import UnaryEngine
from gpu_worker.engines.unary.padding import PaddedBatch, TokenizedInput, pad_inputs
from gpu_worker.models.loading import Loader
from gpu_worker.settings import WorkerSettings
from registry.model_inspection import model_from
from tests.engine.tiny_encoders import CONTEXT, classifier, encoder, prompt
from tests.engine.tiny_models import run_to_end

GIB = 2**30
BYTES_PER_TOKEN = 1000  # of a micro-batch, as the tests below measure it


@pytest.fixture(params=["embed", "classify"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> type[UnaryEngine]:
    """An engine whose model lies in `tmp_path`."""
    if request.param == "embed":
        encoder(tmp_path, "bert", "mean")
        return EmbedEngine
    classifier(tmp_path, "bert")
    return ClassifyEngine


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each micro-batch that is measured; they take so many bytes each."""
    tokens: list[int] = []

    def pad(inputs: Sequence[TokenizedInput], device: torch.device) -> PaddedBatch:
        tokens.append(sum(len(each.tokens) for each in inputs))
        return pad_inputs(inputs, device)

    def measure(device: torch.device, work: Callable[[], None]) -> int:
        work()
        return tokens[-1] * BYTES_PER_TOKEN

    monkeypatch.setattr(batch_memory, "pad_inputs", pad)
    monkeypatch.setattr(device_memory, "measure_peak_bytes", measure)
    return tokens


def weights_of(kind: type[UnaryEngine], directory: Path) -> int:
    return device_memory.model_bytes(kind.load(directory).head.model)


def test_without_a_bound_nothing_is_measured(
    kind: type[UnaryEngine], measured: list[int], tmp_path: Path
) -> None:
    """It would only take time."""
    kind.load(tmp_path)
    assert not measured


@pytest.mark.parametrize(
    ("spare_tokens", "tried"),
    [
        (512, [512]),
        (511, [512, 256]),
        (300, [512, 256]),
        (CONTEXT, [512, 256, 128, CONTEXT]),
    ],
)
def test_micro_batches_are_as_large_as_the_memory_allows(
    kind: type[UnaryEngine],
    measured: list[int],
    spare_tokens: int,
    tried: list[int],
    tmp_path: Path,
) -> None:
    """A large batch is only faster; every input can still be computed."""
    memory = weights_of(kind, tmp_path) + spare_tokens * BYTES_PER_TOKEN
    engine = kind.load(tmp_path, max_batch_tokens=512, memory_bytes=memory)
    assert measured == tried
    inputs = [prompt(n, CONTEXT) for n in range(9)]
    results = run_to_end(engine, [engine_api.Sequence("all", inputs=inputs)])
    assert len(results.terminals["all"].vectors or ()) == 9
    assert engine._max_batch_tokens == tried[-1]


@pytest.mark.parametrize("spare_tokens", [CONTEXT - 1, 0, -1])
def test_a_model_that_cannot_keep_to_its_memory_is_refused_with_the_numbers(
    kind: type[UnaryEngine], measured: list[int], spare_tokens: int, tmp_path: Path
) -> None:
    """At load, not by the system's out-of-memory killer under the first long input."""
    weights = weights_of(kind, tmp_path)
    memory = weights + spare_tokens * BYTES_PER_TOKEN
    with pytest.raises(DoesNotFit) as refusal:
        kind.load(tmp_path, max_batch_tokens=512, memory_bytes=memory)
    assert f"weights take {weights:,} bytes" in str(refusal.value)
    assert f"may take {memory:,} bytes; raise --memory" in str(refusal.value)
    if spare_tokens > 0:
        needed = CONTEXT * BYTES_PER_TOKEN
        assert f"one input of {CONTEXT} tokens {needed:,}" in str(refusal.value)


async def test_a_worker_gives_its_bound_to_unary_engines(
    kind: type[UnaryEngine], tmp_path: Path
) -> None:
    """As it does to those that generate; here with the memory as it is measured."""
    model = model_from(tmp_path, "tiny")
    loader = Loader(WorkerSettings(model=("tiny",), threads=1))
    with capture_logs():
        engine = (await loader.load(model, model.default, GIB)).engine
        assert isinstance(engine, kind)
        with pytest.raises(DoesNotFit, match=r"may take 1,000 bytes; raise --memory"):
            await loader.load(model, model.default, 1000)
