"""Which keys a gateway that strangers can reach does not start with."""

import secrets

import pytest

from registry.credentials.key_format import KeyText
from registry.credentials.key_strength import is_weak


@pytest.mark.parametrize(
    "key",
    [
        "",
        "a",
        "sk-acme",
        "sk-change-me",
        "a" * 100,
        "abababababababababababababababababababab",
        "sk-3f9a1c07be5d2468ac13579bdf0e24",
        "1234567890123456789012345678901",
        "sk-please-change-me-before-you-start-this-thing",
        "your-api-key-goes-here-and-nowhere-else-at-all",
    ],
)
def test_short_and_example_keys_are_weak(key: str) -> None:
    """Whatever their length, these are tried first."""
    assert is_weak(key)


def test_random_keys_of_128_bits_are_not() -> None:
    """In each form in which people make them."""
    made = [
        text
        for _ in range(500)
        for text in (
            "sk-" + secrets.token_urlsafe(24),
            secrets.token_hex(16),
            secrets.token_hex(24).upper(),
            str(KeyText.mint()),
        )
    ]
    assert not any(map(is_weak, made))
