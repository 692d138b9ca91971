"""Whatever shares a batch, and however it is cut, a sequence's greedy tokens are `generate`'s."""

from dataclasses import replace

import pytest

from gpu_worker.engines.engine import Sequence
from streams.subjects import Priority
from tests.engine.tiny_models import (
    ARCHITECTURES,
    engine,
    expected,
    greedy_sequence,
    prompt,
    run_to_end,
)

LENGTHS = (1, 5, 16, 33, 64, 90)
COUNT = 24

SETTINGS: dict[str, dict[str, int | bool]] = {
    "whole": {},
    "chunked": {"max_batch_tokens": 13},
    "tight": {"kv_tokens": 160},
    "tight and chunked": {"kv_tokens": 128, "max_batch_tokens": 11, "max_sequences": 6},
    "no prefix cache": {"prefix_cache": False, "max_batch_tokens": 40},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_greedy_tokens_equal_generate(architecture: str, settings: dict[str, int | bool]) -> None:
    """Paging, chunking, preemption and sharing are invisible in the output."""
    prompts = [prompt(n, length) for n, length in enumerate(LENGTHS)]
    made = engine(architecture, **settings)  # type: ignore[arg-type]
    sequences = [greedy_sequence(f"r{n}", ids, COUNT) for n, ids in enumerate(prompts)]
    results = run_to_end(made, sequences, every=3)
    for n, ids in enumerate(prompts):
        assert results.tokens[f"r{n}"] == expected(architecture, ids, COUNT), f"prompt {n}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tight_pool_preempts(architecture: str) -> None:
    """Otherwise the equality above would say nothing about preemption."""
    made = engine(architecture, kv_tokens=160)
    run_to_end(made, [greedy_sequence(f"r{n}", prompt(n, 60), COUNT) for n in range(4)])
    assert made.stats.preemptions > 0
    assert made.stats.query_tokens == 4 * 60, "a prompt that comes back is no new one"


def test_batch_work_gives_way_and_loses_nothing() -> None:
    """What clients wait for ends first, though it came last; every token is as if alone."""
    made, lanes = engine(kv_tokens=160), (Priority.BATCH, Priority.STANDARD, Priority.INTERACTIVE)
    asked = [
        replace(greedy_sequence(lane, prompt(n, 60), COUNT), priority=lane)
        for n, lane in enumerate(lanes)
    ]
    results = run_to_end(made, asked, every=1)
    assert list(results.terminals) == ["interactive", "standard", "batch"]
    for each in asked:
        assert results.tokens[each.request_id] == expected("llama", each.prompt, COUNT)
    assert made.stats.preemptions > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_prefixes_are_computed_once(architecture: str) -> None:
    """Cached blocks serve a second prompt, and do not change its tokens."""
    made, shared = engine(architecture), prompt(1, 80)
    prompts = [shared + prompt(n, 9) for n in range(3)]
    for n, ids in enumerate(prompts):
        results = run_to_end(made, [greedy_sequence(f"r{n}", ids, COUNT)])
        assert results.tokens[f"r{n}"] == expected(architecture, ids, COUNT)
    assert made.stats.hit_tokens == 2 * 80


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_are_all_returned(architecture: str) -> None:
    """A leak of one block per request would end in refusals after days."""
    made = engine(architecture, kv_tokens=160)
    before = made.free_capacity()
    run_to_end(made, [greedy_sequence(f"r{n}", prompt(n, 40), COUNT) for n in range(5)])
    assert made.free_capacity() == before
    assert made.stats.kv_used == 0


def test_a_resumed_sequence_continues_as_if_never_interrupted() -> None:
    """An attempt after a crash starts from the stored tokens, wherever the crash was."""
    ids, made = prompt(3, 30), engine()
    whole = expected("llama", ids, COUNT)
    for cut in range(1, len(whole)):
        sequence = greedy_sequence(f"r{cut}", ids, COUNT)
        resumed = Sequence(f"r{cut}", ids, sequence.sampling, whole[:cut])
        assert run_to_end(made, [resumed]).tokens[f"r{cut}"] == whole[cut:]
