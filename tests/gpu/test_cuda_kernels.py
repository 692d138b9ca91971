"""What only a GPU can show: its kernels keep their contracts, and recorded steps repeat them.

`bench/gpu.sh` runs these, and `tests/engine/paged/test_triton_decode_attention.py` on the GPU.
"""

import warnings
from collections.abc import Iterator

import pytest
import torch

from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.paged.attention.kernels import flash_attention
from gpu_worker.engines.paged.attention.kernels.selection import PrefillKernel
from gpu_worker.engines.paged.batch.sequence_state import BlockTable, SequenceSlice, SequenceState
from gpu_worker.engines.paged.batch.varlen_batch import VarlenBatch
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model_loader import inspect_model
from gpu_worker.engines.paged.weights.linear_layers import merge_and_pack
from streams.messages import Sampling
from tests.engine import reference_kernels
from tests.engine.tiny_models import expected, greedy_sequence, model, prompt, run_to_end, tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
CUDA = torch.device("cuda")
COUNT = 24


def _engine(architecture: str, dtype: torch.dtype = torch.float32) -> TransformersEngine:
    made = model(architecture)
    made.to(CUDA, dtype)  # type: ignore[arg-type]
    merge_and_pack(made)
    return TransformersEngine(inspect_model(made, tokenizer()), 8, 64, 2048)


@pytest.mark.parametrize(
    "architecture", ["llama", "llama, dynamic RoPE", "gemma3", "mistral", "gpt_neox"]
)
@pytest.mark.parametrize("recorded", [False, True])
def test_greedy_tokens_equal_those_of_a_cpu(architecture: str, recorded: bool) -> None:
    """In float32, with mixed steps, padded steps and windows."""
    engine = _engine(architecture)
    assert engine._runner.attention.kernels.decode
    if recorded:
        engine.warm_up()
        assert engine._runner.graphs, "recording failed; see the log"
    prompts = [prompt(n, length) for n, length in enumerate((1, 16, 33, 90))]
    results = run_to_end(
        engine, [greedy_sequence(f"r{n}", p, COUNT) for n, p in enumerate(prompts)], every=3
    )
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
@pytest.mark.parametrize("way", [flash_attention.attend_gathered, flash_attention.attend_paged])
def test_flash_attention_is_what_its_documentation_says(
    way: PrefillKernel, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests on a CPU stand on that: chunks behind a context, windows, grouped heads."""
    capability, dtype = torch.cuda.get_device_capability(CUDA), torch.bfloat16
    if not flash_attention.is_supported(capability, dtype, {64}):
        pytest.skip("torch has no FlashAttention for this GPU")
    if way is flash_attention.attend_paged and not flash_attention.activate_flash_attention_3(
        capability
    ):
        pytest.skip("FlashAttention 3 is not installed")
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn((2, 40, 16, 2, 64), generator=generator).to(CUDA, dtype)
    query = torch.randn((62, 8, 64), generator=generator).to(CUDA, dtype)
    packed = VarlenBatch([_slice(30, 30, 5, 9), _slice(70, 32, 1, 30, 2, 7, 11)], 0, window, CUDA)
    out = way(query, keys, values, packed, 0.2, window)
    host = torch.device("cpu")
    monkeypatch.setattr(flash_attention, "varlen_attn", reference_kernels.varlen_attn)
    asked = VarlenBatch(packed.slices, 0, window, host)
    want = flash_attention.attend_gathered(
        query.cpu(), keys.cpu(), values.cpu(), asked, 0.2, window
    )
    assert (out.cpu().float() - want.float()).abs().max() < 2e-2


def _slice(length: int, count: int, *blocks: int) -> SequenceSlice:
    run = SequenceState("r", list(range(length)), computed_tokens=length - count)
    run.block_tables = {window: BlockTable(list(blocks)) for window in (None, 20)}
    return SequenceSlice.next_tokens(run, count)
