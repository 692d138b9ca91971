"""What only a GPU can show: its kernels keep their contracts, and recorded steps repeat them.

`bench/gpu.sh` runs these, and `tests/engine/test_split_decode.py` on the GPU.
"""

import warnings
from collections.abc import Iterator

import pytest
import torch

from gpu_worker.engine import Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.kernels import flash
from gpu_worker.engines.paged.kernels.packed import Packed
from gpu_worker.engines.paged.kernels.selection import Prefill
from gpu_worker.engines.paged.model import describe
from gpu_worker.engines.paged.packing import pack
from gpu_worker.engines.paged.run import Run, Slice, Table
from streams.messages import Sampling
from tests.engine import kernels
from tests.engine.tiny import drive, expected, greedy, model, prompt, tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
CUDA = torch.device("cuda")
COUNT = 24


def _engine(architecture: str, dtype: torch.dtype = torch.float32) -> TransformersEngine:
    made = model(architecture)
    made.to(CUDA, dtype)  # type: ignore[arg-type]
    pack(made)
    return TransformersEngine(describe(made, tokenizer()), 8, 64, 2048)


@pytest.mark.parametrize(
    "architecture", ["llama", "llama, dynamic RoPE", "gemma3", "mistral", "gpt_neox"]
)
@pytest.mark.parametrize("recorded", [False, True])
def test_greedy_tokens_equal_those_of_a_cpu(architecture: str, recorded: bool) -> None:
    """In float32, with mixed steps, padded steps and windows."""
    engine = _engine(architecture)
    assert engine._forward.attention.kernels.decode
    if recorded:
        engine.warm_up()
        assert engine._forward.graphs, "recording failed; see the log"
    prompts = [prompt(n, length) for n, length in enumerate((1, 16, 33, 90))]
    results = drive(engine, [greedy(f"r{n}", p, COUNT) for n, p in enumerate(prompts)], every=3)
    for n, ids in enumerate(prompts):
        assert results.tokens[f"r{n}"] == expected(architecture, ids, COUNT)


@pytest.fixture
def synchronisations() -> Iterator[list[warnings.WarningMessage]]:
    """One warning for each time that the host waits for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    torch.cuda.set_sync_debug_mode("default")


def test_a_decode_step_waits_for_the_device_once(
    synchronisations: list[warnings.WarningMessage],
) -> None:
    """To read the tokens; each further wait would leave the device idle."""
    engine = _engine("llama")
    engine.warm_up()
    for n in range(5):
        asked = Sampling(COUNT, temperature=0.8, top_p=0.9, logprobs=2, seed=n)
        engine.add(Sequence(f"r{n}", prompt(n, 10), asked))
    for _ in range(4):
        engine.step()
    synchronisations.clear()
    torch.cuda.set_sync_debug_mode("warn")
    engine.step()
    torch.cuda.set_sync_debug_mode("default")
    assert len(synchronisations) == 1, [str(w.message) for w in synchronisations]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("way", [flash.over_gathered, flash.over_blocks])
def test_flash_attention_is_what_its_documentation_says(
    way: Prefill, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests on a CPU stand on that: chunks behind a context, windows, grouped heads."""
    capability, dtype = torch.cuda.get_device_capability(CUDA), torch.bfloat16
    if not flash.takes(capability, dtype, {64}):
        pytest.skip("torch has no FlashAttention for this GPU")
    if way is flash.over_blocks and not flash.takes_blocks(capability):
        pytest.skip("FlashAttention 3 is not installed")
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn((2, 40, 16, 2, 64), generator=generator).to(CUDA, dtype)
    query = torch.randn((62, 8, 64), generator=generator).to(CUDA, dtype)
    packed = Packed([_slice(30, 30, 5, 9), _slice(70, 32, 1, 30, 2, 7, 11)], 0, window, CUDA)
    out = way(query, keys, values, packed, 0.2, window)
    host = torch.device("cpu")
    monkeypatch.setattr(flash, "varlen_attn", kernels.varlen_attn)
    asked = Packed(packed.slices, 0, window, host)
    want = flash.over_gathered(query.cpu(), keys.cpu(), values.cpu(), asked, 0.2, window)
    assert (out.cpu().float() - want.float()).abs().max() < 2e-2


def _slice(length: int, count: int, *blocks: int) -> Slice:
    run = Run("r", list(range(length)), done=length - count)
    run.tables = {window: Table(list(blocks)) for window in (None, 20)}
    return Slice.of(run, count)
