"""Tensor parallelism, over gloo on a CPU: two ranks compute what one does."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig

from gpu_worker.engines.checkpoints.loading import UnsupportedModel
from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from streams.messages import AdapterRef, Sampling
from tests.engine import tiny_models
from tests.engine.tensor_parallel import followers, load_engine, save_model
from tests.engine.tiny_models import expected, greedy_sequence, prompt, run_to_end

pytestmark = pytest.mark.timeout(400)  # each rank is a process that imports all of transformers

LENGTHS = (40, 45, 50, 1, 16, 90)
COUNT = 24


@dataclass
class Parallel:
    architecture: str
    engine: TransformersEngine


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "llama"])
def parallel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Parallel]:
    directory = save_model(request.param, tmp_path_factory.mktemp(request.param))
    engine = load_engine(directory)
    yield Parallel(request.param, engine)
    engine.close()
    assert not followers(), "a rank is left behind"


def test_greedy_tokens_equal_generate(parallel: Parallel) -> None:
    """Half of the heads here, half there, and no token differs; with chunks and preemption."""
    sequences = [
        greedy_sequence(f"r{n}", prompt(n, length), COUNT) for n, length in enumerate(LENGTHS)
    ]
    results = run_to_end(parallel.engine, sequences, every=1)
    for each in sequences:
        want = expected(parallel.architecture, each.prompt, COUNT)
        assert results.tokens[each.request_id] == want, each.request_id
    assert parallel.engine.stats.preemptions > 0


def test_draws_are_those_of_one_rank(parallel: Parallel) -> None:
    """A sequence may move between workers with other numbers of devices."""
    sampling = Sampling(max_tokens=COUNT, temperature=1.0, seed=5, ignore_eos=True)
    sequences = [Sequence(f"r{n}", prompt(n, 20), sampling) for n in range(3)]
    results = run_to_end(parallel.engine, sequences)
    assert results.tokens == run_to_end(tiny_models.engine(parallel.architecture), sequences).tokens


def test_a_rank_has_its_part_of_the_heads(parallel: Parallel) -> None:
    """Otherwise two devices would hold the KV of one."""
    assert {layer.kv_heads for layer in parallel.engine._runner.attention._layers} == {1}


def test_adapters_are_refused(parallel: Parallel) -> None:
    """Serving the base in an adapter's place would be silent nonsense."""
    adapter = AdapterRef(name="a", digest="00", directory="/", files={}, parameters=1)
    sampling = Sampling(max_tokens=1)
    results = run_to_end(parallel.engine, [Sequence("r", [5], sampling, adapter=adapter)])
    assert "adapters" in str(results.terminals["r"].error)


@pytest.mark.parametrize(
    ("config", "ranks", "reason"),
    [
        (LlamaConfig(**tiny_models.GROUPED), 4, "its 2 KV heads are no multiple of 4"),
        (LlamaConfig(**tiny_models.GROUPED), 3, "its 4 attention heads are no multiple of 3"),
        (GPT2Config(), 2, "no tensor parallel plan"),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    config: LlamaConfig | GPT2Config, ranks: int, reason: str, tmp_path: Path
) -> None:
    """By name, with the numbers, before any process starts or weights are read."""
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{config.model_type} .* {ranks} .*{reason}"):
        load_engine(tmp_path, ranks)
