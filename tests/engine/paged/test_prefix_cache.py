"""The prefix cache as others see it: what was found there, what is there, and for whom."""

from dataclasses import replace
from pathlib import Path

import pytest

from streams import prefix_hashes
from streams.messages import pack_tokens
from tests.engine import lora_adapters, tiny_models
from tests.engine.tiny_models import (
    ARCHITECTURES,
    engine,
    expected,
    greedy_sequence,
    prompt,
    run_to_end,
)

COUNT = 4
SHARED = prompt(1, 130)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sequence_ends_with_what_was_found_of_its_prompt(architecture: str) -> None:
    """Whole blocks of 16, once however often it has to begin again."""
    made = engine(architecture)
    first = run_to_end(made, [greedy_sequence("first", SHARED, COUNT)])
    second = run_to_end(made, [greedy_sequence("second", [*SHARED, 5, 6], COUNT)])
    assert (first.terminals["first"].cached, second.terminals["second"].cached) == (0, 128)


def test_the_marks_of_a_prompt_are_held_once_it_was_computed() -> None:
    """A gateway, which knows no engine, marks the next one alike."""
    made = engine()
    run_to_end(made, [replace(greedy_sequence("r", SHARED, COUNT), tenant="acme")])
    found = prefix_hashes.hash_prompt(pack_tokens(SHARED), prefix_hashes.make_salt("acme"))
    assert len(found) == 3
    assert set(found) <= set(made.cached_prefix_hashes())


def test_what_makes_room_is_held_no_more() -> None:
    """Other prompts take its blocks."""
    made = engine(kv_tokens=160)
    run_to_end(made, [greedy_sequence("r", SHARED, COUNT)])
    before = set(made.cached_prefix_hashes())
    run_to_end(made, [greedy_sequence("other", prompt(2, 140), COUNT)])
    assert before
    assert not before & set(made.cached_prefix_hashes())


def test_a_tenant_finds_nothing_of_anothers() -> None:
    """A prompt that is served faster would tell that somebody has asked it."""
    made = engine()
    asked = [
        replace(greedy_sequence(tenant, SHARED, COUNT), tenant=tenant)
        for tenant in ("acme", "globex")
    ]
    for each in asked:
        results = run_to_end(made, [each])
        assert results.terminals[each.request_id].cached == 0
        assert results.tokens[each.request_id] == expected("llama", SHARED, COUNT)


def test_an_adapter_is_held_once_it_was_loaded(tmp_path: Path) -> None:
    """Another worker would have to load it first."""
    saved = lora_adapters.save_adapter(tmp_path / "pirate", "llama", 1, rank=2)
    adapter = lora_adapters.reference(saved, "pirate")
    made = tiny_models.engine("llama")
    assert prefix_hashes.hash_adapter("pirate") not in made.cached_prefix_hashes()
    run_to_end(made, [lora_adapters.greedy_sequence("r", SHARED, COUNT, adapter)])
    assert prefix_hashes.hash_adapter("pirate") in made.cached_prefix_hashes()
