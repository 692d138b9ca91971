"""The text of a managed key."""

from hypothesis import given
from hypothesis import strategies as st

from registry.credentials.key_format import KeyText
from streams import subjects


def test_a_minted_key_is_parsed_again() -> None:
    """And no two are alike."""
    made = [KeyText.mint() for _ in range(200)]
    assert [KeyText.parse(str(each)) for each in made] == made
    assert len({each.id for each in made}) == len({each.secret for each in made}) == 200
    assert all(subjects.token(each.id) == each.id for each in made)


@given(st.integers(0, 65), st.characters())
def test_a_mistyped_key_is_no_key(at: int, typed: str) -> None:
    """The checksum says so before anything is looked up."""
    text = str(KeyText.mint())
    mistyped = text[:at] + typed + text[at + 1 :]
    assert mistyped == text or KeyText.parse(mistyped) is None


def test_the_secret_is_in_no_repr() -> None:
    """A log that shows arguments shows the id alone."""
    made = KeyText.mint()
    assert made.secret not in repr(made)
