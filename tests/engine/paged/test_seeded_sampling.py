"""A seeded sequence draws the same tokens alone, in company, and behind a crash."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.paged import engine as paged
from gpu_worker.engines.paged.batch.sequence_state import SlidingWindow
from gpu_worker.engines.paged.batch.step_inputs import StepInputs
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model_loader import LoadedCausalLM, inspect_model
from gpu_worker.engines.paged.model_runner import ModelRunner
from gpu_worker.engines.paged.weights.linear_layers import merge_and_pack
from streams.messages import Sampling
from tests.engine.tiny_models import SHAPE, engine, prompt, run_to_end, tokenizer

COUNT = 24

SAMPLINGS = {
    "temperature": Sampling(max_tokens=COUNT, temperature=0.8, seed=5),
    "top_p": Sampling(max_tokens=COUNT, temperature=1.2, top_p=0.8, seed=-3),
    "top_k": Sampling(max_tokens=COUNT, temperature=1.5, top_k=20, seed=2**63),
    "both": Sampling(max_tokens=COUNT, temperature=1.0, top_p=0.9, top_k=40, seed=0),
    "from the request id": Sampling(max_tokens=COUNT, temperature=1.0),
    "greedy": Sampling(max_tokens=COUNT, temperature=0),
}


def _sequences() -> list[Sequence]:
    return [Sequence(n, prompt(i, 9 + 11 * i), s) for i, (n, s) in enumerate(SAMPLINGS.items())]


@pytest.mark.parametrize("batch_tokens", [512, 13])
def test_a_batch_samples_as_each_sequence_alone(batch_tokens: int) -> None:
    """A neighbour, or the way a step is cut, must not change what a tenant gets."""
    together = run_to_end(engine(max_batch_tokens=batch_tokens), _sequences(), every=2)
    for sequence in _sequences():
        alone = run_to_end(engine(), [sequence])
        assert together.tokens[sequence.request_id] == alone.tokens[sequence.request_id]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_resumed_sequence_draws_as_an_uninterrupted_one(name: str) -> None:
    """Randomness is a function of seed and position, so another worker draws the same."""
    sequence = next(s for s in _sequences() if s.request_id == name)
    made = engine()
    whole = run_to_end(made, [sequence])
    for cut in (1, 7, len(whole.tokens[name]) - 1):
        stored = whole.tokens[name][:cut]
        resumed = Sequence(name, sequence.prompt, sequence.sampling, stored)
        assert run_to_end(made, [resumed]).tokens[name] == whole.tokens[name][cut:]


def test_other_seeds_draw_other_tokens() -> None:
    """Otherwise equality would prove nothing."""
    sequences = [
        Sequence(f"s{seed}", prompt(1, 20), Sampling(COUNT, temperature=1.0, seed=seed))
        for seed in range(4)
    ]
    drawn = run_to_end(engine(), sequences).tokens.values()
    assert len({tuple(tokens) for tokens in drawn}) == 4


class RecordingPass(ModelRunner):
    """Keeps all logits, by request and position."""

    def __init__(self, loaded: LoadedCausalLM, blocks: Mapping[SlidingWindow, int]) -> None:
        super().__init__(loaded, blocks)
        self.logits: dict[tuple[str, int], Tensor] = {}

    def _forward(self, plan: StepInputs, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        logits = super()._forward(plan, ids, positions, rows)
        for piece, row in zip(plan.sampled_slices, logits, strict=True):
            self.logits[piece.state.request_id, piece.end] = row.clone()
        return logits


class Recording(TransformersEngine):
    """An engine whose logits can be looked at."""

    def __init__(self, batch_tokens: int) -> None:
        torch.manual_seed(5)
        shape = SHAPE | {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 6}
        shape |= {"max_position_embeddings": 1024, "initializer_range": 0.05}
        shape |= {"num_key_value_heads": 4, "head_dim": 64, "sliding_window": 100}
        config = Gemma3TextConfig(**shape, layer_types=["sliding_attention", "full_attention"] * 3)
        model = Gemma3ForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type]
        merge_and_pack(model)
        super().__init__(inspect_model(model.train(False), tokenizer()), 8, batch_tokens, 4096)

    @property
    def logits(self) -> dict[tuple[str, int], Tensor]:
        assert isinstance(self._runner, RecordingPass)
        return self._runner.logits


def test_bfloat16_logits_are_the_same_bits_alone_in_company_and_behind_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bit of rounding grows, and ends in other tokens: every token is computed alike, always."""
    monkeypatch.setattr(paged, "ModelRunner", RecordingPass)
    lengths = {"a": 1, "b": 12, "c": 31, "d": 130, "e": 600}
    sequences = [
        Sequence(name, prompt(length, length), Sampling(COUNT, temperature=1, seed=length))
        for name, length in lengths.items()
    ]
    company, alone, resumed = Recording(33), Recording(512), Recording(70)
    tokens = run_to_end(company, sequences, every=2).tokens
    for sequence in sequences:
        run_to_end(alone, [sequence])
        stored = tokens[sequence.request_id][:9]
        run_to_end(resumed, [replace(sequence, generated=stored)])
    for other in (alone, resumed):
        for key, logits in other.logits.items():
            assert torch.equal(logits, company.logits[key]), key
