"""Prompts of an exact length that no prefix cache can answer for the next one."""

from hypothesis import given
from hypothesis import strategies as st

from millstream.bench.prompts import POOL, Prompts


@given(st.integers(1, 3 * POOL), st.integers(2, 300_000))
def test_a_prompt_has_the_asked_length_and_stays_in_the_vocabulary(
    tokens: int, vocabulary: int
) -> None:
    """A token id outside the vocabulary is refused."""
    prompt = Prompts(vocabulary, seed=1).make_prompt(tokens)
    assert isinstance(prompt, list)
    assert len(prompt) == tokens
    assert 0 <= min(prompt) <= max(prompt) < vocabulary


def test_prompts_share_no_beginning() -> None:
    """A shared prefix would be cached, and the second request too fast."""
    prompts = Prompts(256, seed=1)
    starts = {tuple(prompts.make_prompt(64)[:16]) for _ in range(POOL // 8)}
    assert len(starts) == POOL // 8


def test_the_same_seed_asks_the_same() -> None:
    """Two runs can only be compared under the same load."""
    one, two = Prompts(1000, seed=3), Prompts(1000, seed=3)
    assert [one.make_prompt(20) for _ in range(5)] == [two.make_prompt(20) for _ in range(5)]


def test_without_a_vocabulary_a_prompt_is_letters() -> None:
    """Some gateways do not say how large it is."""
    prompt = Prompts(None, seed=1).make_prompt(30)
    assert isinstance(prompt, str)
    assert len(prompt) == 30
    assert prompt.isalpha()
