"""Texts of parts of characters: bytes that join to the character, places within the text."""

from streams.logprob_token_text import bare_text, count_characters, spell_bytes, to_bytes


def test_bytes_come_back_from_the_text_that_spells_them() -> None:
    for data in ("🫨".encode()[:1], "é".encode()[1:], b"\xff\x00"):
        assert to_bytes(spell_bytes(data)) == data
    assert spell_bytes(b"\xf0\x9f") == r"bytes:\xf0\x9f"
    assert bare_text(r"bytes:\xf0\x9f") == r"\xf0\x9f"


def test_other_texts_are_their_own_utf8() -> None:
    for text in ("a", "ü", "bytes:", r"bytes:\xzz", "\ufffd"):
        assert (to_bytes(text), bare_text(text)) == (text.encode(), text)


def test_all_tokens_of_a_character_have_its_place() -> None:
    parts = [spell_bytes(bytes([byte])) for byte in "🫨".encode()]
    assert count_characters(["ab", *parts, "c"]) == ([0, 2, 2, 2, 2, 3, 4], b"")


def test_a_character_goes_on_in_a_later_call() -> None:
    first, *rest = [spell_bytes(bytes([byte])) for byte in "é".encode()]
    counts, cut = count_characters(["x", first])
    assert counts == [0, 1, 1]
    assert count_characters([*rest, "y"], cut) == ([0, 1, 2], b"")


def test_bytes_that_form_no_character_count_as_they_are_shown() -> None:
    assert count_characters([spell_bytes(b"\xff"), "a"]) == ([0, 1, 2], b"")
