"""An API key is found wherever popular clients put it."""

import pytest

from gateway.api_key_headers import find_key


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"authorization", b"Bearer sk-a"),
        (b"authorization", b"bearer sk-a"),
        (b"authorization", b"BEARER   sk-a "),
        (b"authorization", b"Bearer\tsk-a"),
        (b"api-key", b"sk-a"),
        (b"x-api-key", b"sk-a"),
        (b"x-goog-api-key", b"sk-a"),
    ],
)
def test_a_key_is_read_from_every_header_of_popular_clients(name: bytes, value: bytes) -> None:
    assert find_key([(b"host", b"x"), (name, value)]) == "sk-a"


def test_authorization_comes_first_unless_it_holds_no_key() -> None:
    assert find_key([(b"api-key", b"b"), (b"authorization", b"Bearer a")]) == "a"
    assert find_key([(b"api-key", b"b"), (b"authorization", b"Basic eDp5")]) == "b"
    assert find_key([(b"api-key", b"b"), (b"authorization", b"Bearer ")]) == "b"


@pytest.mark.parametrize("value", ["sk-ключ".encode(), "sk-é".encode(), "sk-é".encode("latin-1")])
def test_letters_beyond_ascii_may_be_utf8_or_latin1(value: bytes) -> None:
    found = find_key([(b"authorization", b"Bearer " + value)])
    assert found in ("sk-ключ", "sk-é")


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Basic eDp5")], [(b"api-key", b"")]])
def test_without_a_key_there_is_none(headers: list[tuple[bytes, bytes]]) -> None:
    assert find_key(headers) is None
