"""A payload of too many parts is refused before it is parsed, and text alone never is."""

import msgpack
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.schemas import payload_element_limit
from api.schemas.parsing import decode
from api.schemas.payload_element_limit import MAX_PARTS, has_more
from streams.errors import BadRequest

PARTS = {
    "lists": b'{"a":[' + b"[]," * MAX_PARTS + b"[]]}",
    "objects": b'{"a":[' + b"{}," * MAX_PARTS + b"{}]}",
    "texts": b'{"a":[' + b'"\\"",' * MAX_PARTS + b'""]}',
    "names": b"{" + b'"a":1,' * MAX_PARTS + b'"a":1}',
}
MARKS = (b"{", b"[", b'"')
JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text('"\\{[,ü', max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\{[', max_size=3), inner),
)


@pytest.mark.parametrize("what", PARTS)
def test_json_of_too_many_parts_is_not_parsed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing is one call into C, during which nothing else of the gateway runs."""
    monkeypatch.setattr(orjson, "loads", None)
    for data in (PARTS[what], PARTS[what].decode()):
        with pytest.raises(BadRequest, match=f"more than {MAX_PARTS} objects, lists and texts"):
            decode(data)


@pytest.mark.parametrize("part", [[], {}, msgpack.ExtType(1, b"x")])
def test_msgpack_of_too_many_parts_is_given_up(part: object) -> None:
    """A list takes one byte there: 1 MB of them would be a million."""
    with pytest.raises(BadRequest, match=r"more than 65536|extension of type 1"):
        decode(msgpack.packb({"a": [part] * (MAX_PARTS + 1)}), "msgpack")
    with pytest.raises(BadRequest, match="exceeds max_map_len"):
        decode(msgpack.packb(dict.fromkeys(map(str, range(MAX_PARTS + 1)))), "msgpack")


def test_brackets_and_quotes_within_a_text_are_text() -> None:
    """A prompt may be a source file, or JSON itself."""
    text = '{"a":["\\"]}' * MAX_PARTS
    for wire in ({"prompt": text}, {"prompt": text + "\\"}):
        assert decode(orjson.dumps(wire)) == wire
        assert decode(msgpack.packb(wire), "msgpack") == wire


def test_numbers_are_no_parts() -> None:
    """A prompt may be as many token ids as fit a frame."""
    wire = {"prompt": [7] * (3 * MAX_PARTS)}
    assert decode(orjson.dumps(wire)) == decode(msgpack.packb(wire), "msgpack") == wire


@given(JSON)
def test_parts_are_counted_as_a_parser_finds_them(value: object) -> None:
    """An escape that was misread would hide parts, or see some in texts."""
    data = orjson.dumps(value)
    parts = _parts(value)
    assert not has_more(data, MARKS, parts)
    assert parts == 0 or has_more(data, MARKS, parts - 1)


def _parts(value: object) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_parts, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(_parts, value))
    return isinstance(value, str)


def test_what_a_text_may_hold_is_not_told_by_its_escapes_end() -> None:
    """A text that ends in a backslash ends at the next quote."""
    assert has_more(b'["\\\\",[],[],[],"\\\\"]', (b"[",), 3)
    assert not has_more(b'["\\\\\\",[],[],[]"]', (b"[",), 1)


def test_small_msgpack_is_taken_as_before() -> None:
    """The bound is for what is large."""
    assert payload_element_limit.unpack(msgpack.packb({"a": [1, {"b": "c"}]})) == {
        "a": [1, {"b": "c"}]
    }
