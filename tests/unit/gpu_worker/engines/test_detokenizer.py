"""Text comes out whole, whatever the tokens cut in two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from gpu_worker.engines.detokenizer import (
    MAX_PENDING,
    REPLACEMENT_CHARACTER,
    Decoder,
    Detokenizer,
    StopStringFilter,
    TextStream,
)

TEXTS = st.text(st.characters(exclude_characters=REPLACEMENT_CHARACTER, codec="utf-8"))


def _byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen decode: tokens are pieces of bytes."""
    alphabet = sorted(ByteLevel.alphabet())
    made = Tokenizer(BPE({char: number for number, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _byte_fallback() -> Tokenizer:
    """As Gemma and Llama 2 decode: tokens are characters, or bytes where there is none."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {chr(c) if c != 32 else "▁": 224 + c for c in range(32, 127)}
    made = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps)
    return made


BYTES = _byte_level()
FALLBACK = _byte_fallback()


def _byte_tokens(text: str) -> list[int]:
    ids: list[int] = BYTES.encode(text).ids
    return ids


def _fallback_tokens(text: str) -> list[int]:
    """Printable ASCII as characters, all else as bytes."""
    ids: list[int] = []
    for char in text:
        ids += [224 + ord(char)] if 32 <= ord(char) < 127 else char.encode()
    return ids


@given(TEXTS)
def test_the_pieces_of_a_byte_level_text_are_the_text(text: str) -> None:
    """Nothing is lost, doubled or split."""
    made = Detokenizer(BYTES)
    pieces = [made.push(token) for token in _byte_tokens(text)]
    assert REPLACEMENT_CHARACTER not in "".join(pieces)
    assert "".join(pieces) + made.flush() == text


@given(TEXTS)
def test_the_pieces_of_a_byte_fallback_text_are_the_text(text: str) -> None:
    """Here a character that lacks its end shows as several replacement characters."""
    made = Detokenizer(FALLBACK)
    pieces = [made.push(token) for token in _fallback_tokens(text)]
    assert REPLACEMENT_CHARACTER not in "".join(pieces)
    assert "".join(pieces) + made.flush() == text


@given(st.lists(st.integers(0, 255), max_size=60))
def test_invalid_bytes_come_out_as_a_whole_decode_has_them(tokens: list[int]) -> None:
    """A model may babble; what the end has cut within a character is not shown."""
    made = Detokenizer(BYTES)
    text = "".join(made.push(token) for token in tokens) + made.flush()
    assert text == BYTES.decode(tokens).rstrip(REPLACEMENT_CHARACTER)


@pytest.mark.parametrize("decoder", [BYTES, FALLBACK])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_an_output_that_ends_within_a_character_ends_before_it(
    decoder: Decoder, length: int
) -> None:
    cut = [*(_byte_tokens("ab") if decoder is BYTES else _fallback_tokens("ab"))]
    made = Detokenizer(decoder)
    pieces = [made.push(token) for token in [*cut, *"🫨".encode()[:length]]]
    assert "".join(pieces) + made.flush() == "ab"


def test_the_window_stays_small() -> None:
    """Each token costs the same, however long the text and however odd its bytes."""
    made = Detokenizer(BYTES)
    longest = 0
    for token in _byte_tokens("Grüße an alle 🙂 ") * 40 + _byte_tokens("é")[:1] * 500:
        made.push(token)
        longest = max(longest, len(made._context) + len(made._pending))
    assert longest <= 2 * MAX_PENDING


def test_a_leading_space_survives_behind_a_prompt() -> None:
    """Decoders of this kind drop a text's first space: the prompt's end is kept as context."""
    words = Tokenizer(BPE({"▁a": 0, "▁b": 1}, []))
    words.decoder = decoders.Metaspace()
    made = Detokenizer(words, [0])
    assert made.push(1) == " b"


@given(TEXTS, st.data())
def test_replaying_stored_tokens_continues_the_text(text: str, data: st.DataObject) -> None:
    """A later attempt discards the text of the replayed tokens, and continues exactly."""
    tokens = _byte_tokens(text)
    cut = data.draw(st.integers(0, len(tokens)))
    stops = data.draw(st.lists(st.text("abc", min_size=1, max_size=3), max_size=2))
    first, second = TextStream(BYTES, [], stops), TextStream(BYTES, [], stops)
    pieces = [first.push(token) for token in tokens]
    for token in tokens[:cut]:
        second.push(token)
    assert [second.push(token) for token in tokens[cut:]] == pieces[cut:]
    assert second.finish() == first.finish()


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_text_before_a_stop_string_comes_out_and_nothing_behind_it(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """However the text is cut into pieces of one character or more."""
    made, out, seen = StopStringFilter(stops), "", ""
    rest = text
    while rest and not made.matched:
        size = data.draw(st.integers(1, 3))
        out, seen, rest = out + made.push(rest[:size]), seen + rest[:size], rest[size:]
    found = [(at, len(stop), stop) for stop in stops if (at := seen.find(stop)) >= 0]
    at, _, matched = min(found, default=(len(text), 0, ""))
    assert (made.matched, out + made.flush()) == (matched, text[:at])


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    """A reader should not wait for text that is certain."""
    made, out = StopStringFilter(stops), ""
    for char in text:
        out += made.push(char)
    held = made.flush()
    assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_nothing_is_held(stops: list[str]) -> None:
    """An empty stop string would otherwise end every text at once."""
    assert StopStringFilter(stops).push("abc") == "abc"
