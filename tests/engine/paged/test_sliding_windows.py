"""Layers that see a window keep that much KV, share prefixes all the same, and harm nobody."""

import pytest
import torch
from torch import nn

from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model_loader import inspect_model, kv_bytes, max_kv_tokens
from tests.engine.tiny_models import (
    CONTEXT,
    VOCABULARY,
    Results,
    engine,
    expected,
    greedy_sequence,
    load_tiny_model,
    model,
    prompt,
    run_to_end,
    tokenizer,
)

COUNT = 24
CHUNK = 16
SLIDING = ("gemma3", "mistral")
HELD = 6 * 16  # tokens of the blocks that a window of 20 or 24 and a chunk lie in


@pytest.mark.parametrize("architecture", SLIDING)
def test_a_long_sequence_holds_its_window(architecture: str) -> None:
    """In Gemma's layer that sees everything it holds everything."""
    made, ids, results = engine(architecture, max_batch_tokens=CHUNK), prompt(1, 200), Results()
    whole = 0 if architecture == "mistral" else CONTEXT
    made.add(greedy_sequence("r", ids, COUNT))
    while not made.idle:
        results.add(made.step())
        assert made.stats.kv_used <= HELD + whole
    assert results.tokens["r"] == expected(architecture, ids, COUNT)


@pytest.mark.parametrize("architecture", SLIDING)
def test_a_prefix_of_many_windows_is_computed_once(architecture: str) -> None:
    """What slid out of the window is not needed to go on from its end."""
    made, shared = engine(architecture, max_batch_tokens=CHUNK), prompt(1, 160)
    for n in range(3):
        ids = shared + prompt(n, 9)
        results = run_to_end(made, [greedy_sequence(f"r{n}", ids, COUNT)])
        assert results.tokens[f"r{n}"] == expected(architecture, ids, COUNT)
    assert made.stats.hit_tokens == 2 * 160


class _Poisonous(nn.Module):
    """An embedding that is NaN for one token."""

    def __init__(self, inner: nn.Module, poison: int) -> None:
        super().__init__()
        self.inner, self.poison = inner, poison

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(ids)
        return out.masked_fill((ids == self.poison)[..., None], torch.nan)


@pytest.mark.parametrize("architecture", SLIDING)
def test_the_next_owner_of_a_block_is_safe_from_what_slid_out_of_a_window(
    architecture: str,
) -> None:
    """It is given back before it is known that its owner is bad; a masked NaN is still a NaN."""
    made = model(architecture)
    prompts = [prompt(n, 60) for n in range(3)]
    wanted = [expected(architecture, ids, COUNT) for ids in prompts]
    seen = {token for tokens in (*prompts, *wanted) for token in tokens}
    poison = next(token for token in range(3, VOCABULARY) if token not in seen)
    made.set_input_embeddings(_Poisonous(made.get_input_embeddings(), poison))
    small = TransformersEngine(inspect_model(made, tokenizer()), 3, CHUNK, 240)
    bad = greedy_sequence("bad", [poison] * 40 + prompt(9, 160), COUNT)
    healthy = [greedy_sequence(f"r{n}", ids, COUNT) for n, ids in enumerate(prompts)]
    results = run_to_end(small, [bad, *healthy])
    assert [results.tokens[f"r{n}"] for n in range(3)] == wanted


def test_windows_leave_memory_for_more_tokens() -> None:
    """One layer of Gemma's three grows with the context, none of Mistral's; all of Llama's do."""
    spare, most = 2_100_000, 16 * CONTEXT
    tokens = {
        name: max_kv_tokens(load_tiny_model(name), 16, 17, spare) for name in ("llama", *SLIDING)
    }
    assert tokens["llama"] < tokens["gemma3"] < tokens["mistral"] == most
    for name, count in tokens.items():
        assert kv_bytes(load_tiny_model(name), count, 16, 17) <= spare
        assert count == most or kv_bytes(load_tiny_model(name), count + 1, 16, 17) > spare
