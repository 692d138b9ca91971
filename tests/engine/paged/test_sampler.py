"""The sampler draws what its settings allow, in the right proportions, and the same under noise."""

import pytest
import torch
from torch import Tensor

from gpu_worker.engines.paged.sampler import CANDIDATES, RowSampling, draw_uniform, sample
from gpu_worker.engines.seeds import derive_seed
from streams.messages import ResolvedSampling

PROBABILITIES = (0.15, 0.5, 0.05, 0.3)
DRAWS = 4000


def _draw(logits: Tensor, sampling: ResolvedSampling, uniforms: list[float]) -> list[int]:
    rows = logits.expand(len(uniforms), -1)
    sampled = sample(rows, [RowSampling(sampling, u) for u in uniforms])
    return [s.token for s in sampled if s.token is not None]


def _grid() -> list[float]:
    return [(i + 0.5) / DRAWS for i in range(DRAWS)]


@pytest.mark.parametrize(
    ("sampling", "want"),
    [
        (ResolvedSampling(temperature=1), (0.15, 0.5, 0.05, 0.3)),
        (ResolvedSampling(temperature=1, top_k=2), (0, 0.625, 0, 0.375)),
        (ResolvedSampling(temperature=1, top_p=0.7), (0, 0.625, 0, 0.375)),
        (
            ResolvedSampling(temperature=1, top_p=0.81, top_k=3),
            (0, 0.625, 0, 0.375),
        ),  # of .95: .84
        (ResolvedSampling(temperature=1, top_p=0.85, top_k=3), (0.158, 0.526, 0, 0.316)),
        (ResolvedSampling(temperature=0.5), (0.0616, 0.685, 0.0068, 0.2466)),
        (ResolvedSampling(temperature=1, top_p=0.0001), (0, 1, 0, 0)),
        (ResolvedSampling(temperature=0), (0, 1, 0, 0)),
    ],
)
def test_tokens_come_in_their_proportions(
    sampling: ResolvedSampling, want: tuple[float, float, float, float]
) -> None:
    """After temperature, then the cuts, what is left is scaled up evenly."""
    drawn = _draw(torch.tensor([PROBABILITIES]).log(), sampling, _grid())
    found = [drawn.count(token) / DRAWS for token in range(4)]
    assert found == pytest.approx(want, abs=2e-3)


def test_rows_keep_to_their_own_rules() -> None:
    """Greedy, sampled and cut rows share a batch."""
    logits = torch.tensor([PROBABILITIES]).log().expand(3, -1)
    choices = [
        RowSampling(ResolvedSampling(temperature=0)),
        RowSampling(ResolvedSampling(temperature=1), 0.01),
        RowSampling(ResolvedSampling(temperature=1, top_k=1), 0.01),
    ]
    assert [s.token for s in sample(logits, choices)] == [1, 0, 1]


@pytest.mark.parametrize("vocabulary", [512, 700, 5000])
@pytest.mark.parametrize("point", [0.0, 0.5, 1 - 2**-56, 1 - 2**-24])
def test_no_draw_leads_to_a_token_that_was_cut(vocabulary: int, point: float) -> None:
    """Not even at the ends, where sums round."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn((1, vocabulary), generator=generator)
    best = set(logits[0].topk(20).indices.tolist())
    assert _draw(logits, ResolvedSampling(temperature=1, top_k=20), [point])[0] in best


def test_a_nucleus_of_many_tokens_is_found_exactly() -> None:
    """A flat distribution reaches beyond the candidates that are looked at first."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((1, 4000), generator=generator) * 0.3
    ordered = logits.softmax(-1).sort(descending=True)
    size = int((ordered.values.cumsum(-1) < 0.9).sum()) + 1
    assert size > CANDIDATES
    drawn = set(_draw(logits, ResolvedSampling(temperature=1, top_p=0.9), _grid()))
    assert drawn <= set(ordered.indices[0, :size].tolist())
    assert len(drawn) > CANDIDATES


def test_noise_of_rounding_moves_no_draw() -> None:
    """Another batch size rounds differently: tokens must not depend on it."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn((64, 30_000), generator=generator) * 3
    noisy = logits + torch.randn(logits.shape, generator=generator) * 1e-6
    choices = [
        RowSampling(ResolvedSampling(temperature=1, top_p=0.95), draw_uniform(7, i))
        for i in range(64)
    ]
    assert sample(logits, choices) == sample(noisy, choices)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_a_number_yields_no_token_and_harms_no_neighbour(
    bad: float, temperature: float
) -> None:
    """The engine fails that request, and only that one."""
    logits = torch.tensor([PROBABILITIES, PROBABILITIES]).log()
    logits[0, 2] = bad
    choices = [RowSampling(ResolvedSampling(temperature=temperature, logprobs=1), 0.3)] * 2
    assert [s.token for s in sample(logits, choices)] == [None, 1]


def test_bfloat16_and_an_empty_batch_are_fine() -> None:
    """Models compute in it; a step of prefill alone has no logits."""
    logits = torch.tensor([PROBABILITIES]).log().bfloat16()
    assert sample(logits, [RowSampling(ResolvedSampling(temperature=0))])[0].token == 1
    assert sample(logits[:0], []) == []


def test_a_draw_is_a_function_of_seed_and_position() -> None:
    """Evenly spread over [0, 1), whatever the seeds."""
    draws = [draw_uniform(seed, position) for seed in (-1, 0, 2**64) for position in range(1000)]
    assert draws == [
        draw_uniform(seed, position) for seed in (-1, 0, 2**64) for position in range(1000)
    ]
    assert len(set(draws)) == 3000
    assert all(0 <= u < 1 for u in draws)
    assert sum(draws) / 3000 == pytest.approx(0.5, abs=0.03)
    assert derive_seed("a") != derive_seed("b")


@pytest.mark.parametrize("vocabulary", [300, 512, 1700, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_highest(vocabulary: int, dtype: torch.dtype) -> None:
    """Wherever it lies; bfloat16 has many equal ones."""
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0, -1] = logits[1, 0] = 9
    sampled = sample(logits, [RowSampling(ResolvedSampling(temperature=0))] * len(logits))
    first = [(row == row.max()).nonzero()[0, 0].item() for row in logits.float()]
    assert [s.token for s in sampled] == first
