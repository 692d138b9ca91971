"""The prefix cache as others see it: what was found there, what is there, and for whom."""

from dataclasses import replace
from pathlib import Path

import pytest

from streams import marks
from streams.messages import pack_tokens
from tests.engine import lora, tiny
from tests.engine.tiny import ARCHITECTURES, drive, engine, expected, greedy, prompt

COUNT = 4
SHARED = prompt(1, 130)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sequence_ends_with_what_was_found_of_its_prompt(architecture: str) -> None:
    """Whole blocks of 16, once however often it has to begin again."""
    made = engine(architecture)
    first = drive(made, [greedy("first", SHARED, COUNT)])
    second = drive(made, [greedy("second", [*SHARED, 5, 6], COUNT)])
    assert (first.last["first"].cached, second.last["second"].cached) == (0, 128)


def test_the_marks_of_a_prompt_are_held_once_it_was_computed() -> None:
    """A gateway, which knows no engine, marks the next one alike."""
    made = engine()
    drive(made, [replace(greedy("r", SHARED, COUNT), tenant="acme")])
    found = marks.of_prompt(pack_tokens(SHARED), marks.salt("acme"))
    assert len(found) == 3
    assert set(found) <= set(made.holds())


def test_what_makes_room_is_held_no_more() -> None:
    """Other prompts take its blocks."""
    made = engine(kv_tokens=160)
    drive(made, [greedy("r", SHARED, COUNT)])
    before = set(made.holds())
    drive(made, [greedy("other", prompt(2, 140), COUNT)])
    assert before
    assert not before & set(made.holds())


def test_a_tenant_finds_nothing_of_anothers() -> None:
    """A prompt that is served faster would tell that somebody has asked it."""
    made = engine()
    asked = [replace(greedy(tenant, SHARED, COUNT), tenant=tenant) for tenant in ("acme", "globex")]
    for each in asked:
        results = drive(made, [each])
        assert results.last[each.request_id].cached == 0
        assert results.tokens[each.request_id] == expected("llama", SHARED, COUNT)


def test_an_adapter_is_held_once_it_was_loaded(tmp_path: Path) -> None:
    """Another worker would have to load it first."""
    saved = lora.save(tmp_path / "pirate", "llama", 1, rank=2)
    adapter = lora.reference(saved, "pirate")
    made = tiny.engine("llama")
    assert marks.of_adapter("pirate") not in made.holds()
    drive(made, [lora.ask("r", SHARED, COUNT, adapter)])
    assert marks.of_adapter("pirate") in made.holds()
