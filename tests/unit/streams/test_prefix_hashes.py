"""Marks: what two prompts have in common, told in a few bytes."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS
from gpu_worker.engines.paged.batch.sequence_state import SequenceState
from streams import prefix_hashes
from streams.messages import pack_tokens

SALT = prefix_hashes.make_salt("acme")


def of(tokens: list[int], salt: bytes = SALT) -> list[int]:
    return prefix_hashes.hash_prompt(pack_tokens(tokens), salt)


@given(st.integers(0, 600), st.integers(0, 600), st.integers(0, 600))
def test_two_prompts_share_the_marks_within_their_common_start(
    shared: int, one: int, other: int
) -> None:
    """So the longest mark that a worker holds says how much of a prompt it has."""
    start = list(range(shared))
    first, second = of(start + [7] * one), of(start + [8] * other)
    common = [mark for mark, same in zip(first, second, strict=False) if mark == same]
    assert len(common) == len(list(prefix_hashes.hash_positions(shared)))
    assert first[: len(common)] == common


def test_tenants_and_adapters_share_no_marks() -> None:
    """Who learns that a prompt was there before learns what others have asked."""
    prompt = list(range(1000))
    others = [
        of(prompt, prefix_hashes.make_salt("globex")),
        of(prompt, prefix_hashes.make_salt("acme", "ab" * 32)),
    ]
    assert not set(of(prompt)) & {mark for found in others for mark in found}


def test_an_engine_that_keeps_digests_by_block_finds_the_same_marks() -> None:
    """Gateways hash from mark to mark, engines from block to block."""
    prompt = list(range(1000))
    run = SequenceState("r", prompt, SALT)
    places = list(prefix_hashes.hash_positions(len(prompt)))
    digests = [run.digest_block(place // BLOCK_TOKENS - 1) for place in places]
    assert of(prompt) == [prefix_hashes.truncate_digest(digest) for digest in digests]


def test_a_prompt_is_marked_at_powers_of_two_and_halfway_between() -> None:
    """Few enough for a header, and two thirds of any shared start are found."""
    assert list(prefix_hashes.hash_positions(400)) == [64, 96, 128, 192, 256, 384]
    assert [n for n in range(1, 401) if prefix_hashes.is_hash_position(n)] == list(
        prefix_hashes.hash_positions(400)
    )
    assert len(prefix_hashes.to_header(of([1] * 200_000))) <= 256


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30))
def test_a_header_gives_its_marks_back(found: list[int]) -> None:
    """They come from the gateway to the dispatcher as text."""
    assert list(prefix_hashes.from_header(prefix_hashes.to_header(found))) == found
