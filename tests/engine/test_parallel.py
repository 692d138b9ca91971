"""Tensor parallelism, over gloo on a CPU: two ranks compute what one does, and die together."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from transformers import GPT2Config, LlamaConfig

from gpu_worker.engine import DeviceLost, Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model import Unsupported
from streams.messages import Adapter, Sampling
from tests.engine import tiny
from tests.engine.tiny import drive, expected, greedy, prompt

pytestmark = pytest.mark.timeout(400)  # each rank is a process that imports all of transformers

LENGTHS = (40, 45, 50, 1, 16, 90)
COUNT = 24


@dataclass
class Parallel:
    architecture: str
    engine: TransformersEngine

    @property
    def follower(self) -> psutil.Process:
        """The process of rank 1."""
        (follower,) = (
            p for p in psutil.Process().children() if "paged.follower" in str(p.cmdline())
        )
        return follower


def saved(architecture: str, directory: Path) -> Path:
    tiny.model(architecture).save_pretrained(directory)
    tiny.tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def load(directory: Path, ranks: int = 2) -> TransformersEngine:
    """Chunked, and with a pool that preempts."""
    return TransformersEngine.load(
        directory,
        device="cpu",
        threads=2,
        tensor_parallel_size=ranks,
        max_sequences=4,
        max_batch_tokens=40,
        kv_tokens=160,
    )


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "llama"])
def parallel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Parallel]:
    directory = saved(request.param, tmp_path_factory.mktemp(request.param))
    engine = load(directory)
    yield Parallel(request.param, engine)
    engine.close()
    assert not psutil.Process().children(), "a rank is left behind"


def test_greedy_tokens_equal_generate(parallel: Parallel) -> None:
    """Half of the heads here, half there, and no token differs; with chunks and preemption."""
    sequences = [greedy(f"r{n}", prompt(n, length), COUNT) for n, length in enumerate(LENGTHS)]
    results = drive(parallel.engine, sequences, every=1)
    for each in sequences:
        want = expected(parallel.architecture, each.prompt, COUNT)
        assert results.tokens[each.request_id] == want, each.request_id
    assert parallel.engine.stats.preemptions > 0


def test_draws_are_those_of_one_rank(parallel: Parallel) -> None:
    """A sequence may move between workers with other numbers of devices."""
    sampling = Sampling(max_tokens=COUNT, temperature=1.0, seed=5, ignore_eos=True)
    sequences = [Sequence(f"r{n}", prompt(n, 20), sampling) for n in range(3)]
    results = drive(parallel.engine, sequences)
    assert results.tokens == drive(tiny.engine(parallel.architecture), sequences).tokens


def test_a_rank_has_its_part_of_the_heads(parallel: Parallel) -> None:
    """Otherwise two devices would hold the KV of one."""
    assert {layer.kv_heads for layer in parallel.engine._attention._layers} == {1}


def test_adapters_are_refused(parallel: Parallel) -> None:
    """Serving the base in an adapter's place would be silent nonsense."""
    adapter = Adapter(name="a", digest="00", directory="/", files={}, parameters=1)
    sampling = Sampling(max_tokens=1)
    results = drive(parallel.engine, [Sequence("r", [5], sampling, adapter=adapter)])
    assert "adapters" in str(results.last["r"].error)


def test_an_engine_that_lost_a_rank_says_so(tmp_path: Path) -> None:
    """It must neither hang in a collective nor wait for the next request to find out."""
    made = Parallel("llama", load(saved("llama", tmp_path)))
    made.engine.add(greedy("r", prompt(1, 20), 100))
    made.engine.step()
    made.follower.kill()
    with pytest.raises(DeviceLost):
        drive(made.engine, [])
    made.engine.close()
    assert not psutil.Process().children()


SCRIPT = """
import sys, time
from pathlib import Path
from tests.engine.test_parallel import load
engine = load(Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""


def test_ranks_do_not_outlive_the_first(tmp_path: Path) -> None:
    """A killed worker must not leave processes that hold its devices' memory."""
    command = [sys.executable, "-c", SCRIPT, str(saved("llama", tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout
        assert first.stdout.readline() == b"ready\n"
        first.kill()
        assert first.stdout.read() == b"", (
            "ends when nobody holds the pipe open, no follower either"
        )


@pytest.mark.parametrize(
    ("config", "ranks", "reason"),
    [
        (LlamaConfig(**tiny.GROUPED), 4, "its 2 KV heads are no multiple of 4"),
        (LlamaConfig(**tiny.GROUPED), 3, "its 4 attention heads are no multiple of 3"),
        (GPT2Config(), 2, "no tensor parallel plan"),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    config: LlamaConfig | GPT2Config, ranks: int, reason: str, tmp_path: Path
) -> None:
    """By name, with the numbers, before any process starts or weights are read."""
    config.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=f"{config.model_type} .* {ranks} .*{reason}"):
        load(tmp_path, ranks)
