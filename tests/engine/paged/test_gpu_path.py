"""The path that a GPU takes, on a CPU: kernels in plain PyTorch, graphs that compute again.

What is left for a real GPU (tests/gpu) is that its kernels keep their contracts.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.paged import cuda_graphs
from gpu_worker.engines.paged.attention import paged_attention
from gpu_worker.engines.paged.attention.kernels import flash_attention, selection
from gpu_worker.engines.paged.attention.kernels.selection import AttentionKernels, select_kernels
from gpu_worker.engines.paged.batch.decode_inputs import DecodeInputBuffers
from gpu_worker.engines.paged.batch.sequence_state import BlockTable, SequenceSlice, SequenceState
from gpu_worker.engines.paged.cuda_graphs import DecodeGraphs, capture_sizes
from streams.messages import Sampling
from tests.engine import reference_kernels
from tests.engine.tiny_models import engine, expected, greedy_sequence, prompt, run_to_end

CPU = torch.device("cpu")
LENGTHS = (1, 16, 33, 70)
COUNT = 12
SETS = {
    "blocks": AttentionKernels(flash_attention.decode_paged, flash_attention.attend_paged),
    "gathered": AttentionKernels(reference_kernels.decode, flash_attention.attend_gathered),
    "decode alone": AttentionKernels(reference_kernels.decode),
}


@pytest.fixture(params=list(SETS.values()), ids=list(SETS))
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made now take a GPU's path."""
    monkeypatch.setattr(flash_attention, "varlen_attn", reference_kernels.varlen_attn)
    monkeypatch.setattr(flash_attention, "_PARAMETERS", {"enable_gqa"})
    monkeypatch.setattr(paged_attention, "select_kernels", lambda *_: request.param)


def _sequences() -> list[Sequence]:
    return [greedy_sequence(f"r{n}", prompt(n, length), COUNT) for n, length in enumerate(LENGTHS)]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral"])
def test_greedy_tokens_equal_generate(architecture: str) -> None:
    """Mixed steps, padded decode steps, windows, chunks and preemption, in one run."""
    made = engine(architecture, kv_tokens=160, max_batch_tokens=21)
    results = run_to_end(made, _sequences(), every=3)
    for sequence in _sequences():
        want = expected(architecture, sequence.prompt, COUNT)
        assert results.tokens[sequence.request_id] == want


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU's path, and the sizes of the decode steps that it recorded or replayed."""
    ran: list[int] = []
    original = DecodeGraphs._capture_or_replay

    def replay(self: DecodeGraphs, size: int) -> None:
        ran.append(size)
        original(self, size)

    monkeypatch.setattr(
        paged_attention, "select_kernels", lambda *_: AttentionKernels(reference_kernels.decode)
    )
    monkeypatch.setattr(DecodeGraphs, "_capture_or_replay", replay)
    return ran


def test_steps_that_only_decode_are_padded(padded: list[int]) -> None:
    """Five sequences in a graph for eight; as they end, in smaller ones."""
    sequences = [greedy_sequence(f"r{n}", prompt(n, 4), 3 + 4 * n) for n in range(5)]
    run_to_end(engine(max_sequences=12), sequences)
    assert sorted(set(padded)) == [1, 2, 4, 8]


def test_warm_up_records_every_size_the_largest_first(padded: list[int]) -> None:
    """The smaller ones then fit the memory that it took."""
    made = engine(max_sequences=12)
    made.warm_up()
    recorded = padded[-5:]
    assert recorded == [12, 8, 4, 2, 1]


@pytest.mark.usefixtures("padded")
def test_seeds_draw_the_same_tokens_on_either_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """With log probabilities, cuts and penalties, which read the device once a step."""
    asked = Sampling(COUNT, temperature=0.9, top_p=0.9, logprobs=3, seed=5, presence_penalty=0.5)
    sequences = [replace(s, sampling=asked) for s in _sequences()]
    padded = run_to_end(engine(), sequences)
    monkeypatch.setattr(paged_attention, "select_kernels", select_kernels)
    assert run_to_end(engine(), sequences).tokens == padded.tokens


def test_a_model_that_cannot_be_recorded_runs_without(
    padded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some wait for the device in their forward pass, which a recording does not allow."""

    def refuse(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "choose_recorder", lambda device: refuse)
    ids = prompt(1, 12)
    made = engine()
    made._runner.capture_graphs()
    assert run_to_end(made, [greedy_sequence("a", ids, COUNT)]).tokens["a"] == expected(
        "llama", ids, COUNT
    )
    assert padded == [8]


def test_sizes_waste_little() -> None:
    """At most seven rows of padding."""
    assert capture_sizes(1) == [1]
    assert capture_sizes(3) == [1, 2, 3]
    assert capture_sizes(30) == [1, 2, 4, 8, 16, 24, 30]


def _decoding(tokens: int, *blocks: int, first: int = 0) -> SequenceSlice:
    run = SequenceState("r", list(range(tokens)), computed_tokens=tokens - 1)
    run.block_tables[20] = BlockTable(list(blocks), first)
    return SequenceSlice.next_tokens(run, 1)


def test_rows_follow_their_sequences() -> None:
    """A row is sent again where its sequence grew, slid or was replaced, and padding is spare."""
    batch = DecodeInputBuffers([20], 4, 80, CPU)
    long, short = _decoding(40, 7, 3, 9), _decoding(3, 5)
    batch.fill([long, short], 4)
    step = batch.inputs(4)
    assert step.block_tables[20][:2, :3].tolist() == [[7, 3, 9], [5, 0, 0]]
    assert step.slot_mapping(20).tolist() == [9 * 16 + 7, 5 * 16 + 2, 0, 0]
    assert step.seq_lens.tolist() == [40, 3, 1, 1]
    table = long.state.block_tables[20]
    table.blocks[:] = [0, 3, 9, 4]
    table.first_held = 1
    batch.fill([long], 2)
    assert batch.inputs(2).block_tables[20][:, :4].tolist() == [[0, 3, 9, 4], [0, 0, 0, 0]]
    batch.fill([short, long], 2)
    step = batch.inputs(2)
    assert step.block_tables[20][0, 0] == 5
    assert step.block_tables[20][1, :4].tolist() == [0, 3, 9, 4]


def test_a_cpu_has_its_own_way() -> None:
    """Its kernels gather: blocks are read where they are on a GPU only."""
    assert select_kernels(CPU, torch.bfloat16, {64}) == AttentionKernels()
    assert engine()._runner.graphs is None


@pytest.mark.parametrize(
    ("capability", "dtype", "dims", "fits"),
    [
        ((8, 0), torch.bfloat16, {64, 128}, True),
        ((9, 0), torch.float16, {256}, True),
        ((9, 0), torch.float32, {64}, False),
        ((7, 5), torch.float16, {64}, False),
        ((9, 0), torch.bfloat16, {320}, False),
        ((9, 0), torch.bfloat16, {100}, False),
    ],
)
def test_flash_attention_is_asked_only_for_what_it_can(
    capability: tuple[int, int], dtype: torch.dtype, dims: set[int], fits: bool
) -> None:
    """Elsewhere it would raise in the first step."""
    assert flash_attention.is_supported(capability, dtype, dims) is fits


@pytest.mark.parametrize(
    ("capability", "dtype", "flash3", "found"),
    [
        (
            (9, 0),
            torch.bfloat16,
            True,
            AttentionKernels(flash_attention.decode_paged, flash_attention.attend_paged),
        ),
        (
            (9, 0),
            torch.bfloat16,
            False,
            AttentionKernels(reference_kernels.decode, flash_attention.attend_gathered),
        ),
        ((9, 0), torch.float32, True, AttentionKernels(reference_kernels.decode)),
        ((7, 5), torch.float16, False, AttentionKernels(reference_kernels.decode)),
    ],
)
def test_the_best_that_is_there_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    flash3: bool,
    found: AttentionKernels,
) -> None:
    """FlashAttention 3, then Triton and torch's FlashAttention, then each alone."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flash_attention, "activate_flash_attention_3", lambda capability: flash3)
    monkeypatch.setattr(selection, "_import_triton_decode", lambda: reference_kernels.decode)
    assert select_kernels(torch.device("cuda"), dtype, {64}) == found
