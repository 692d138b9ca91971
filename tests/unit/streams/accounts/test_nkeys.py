"""Keys are those that nats-server and nsc read, and a seed is shown to nobody."""

import pytest

from streams.accounts.nkeys import InvalidKey, KeyKind, KeyPair, kind_of, verifies

# As nkeys writes one: github.com/nats-io/nkeys
SEED = "SUAGMJH5XLGZKQQWAWKRZJIGMOU4HPFUYLXJMXOO5NLFEO2OOQJ5LPRDPM"


@pytest.mark.parametrize(("kind", "letter"), [(k, k.name[0]) for k in KeyKind])
def test_a_key_says_whose_it_is(kind: KeyKind, letter: str) -> None:
    """A user's key must not pass for an operator's."""
    pair = KeyPair.generate(kind)
    again = KeyPair.from_seed(pair.seed, kind)
    assert (pair.public[0], pair.seed[:2], len(pair.public)) == (letter, f"S{letter}", 56)
    assert (again.public, kind_of(pair.public)) == (pair.public, kind)


def test_a_seed_made_elsewhere_is_read() -> None:
    """Operators bring keys that nsc made."""
    pair = KeyPair.from_seed(f" {SEED}\n")
    assert (pair.kind, pair.seed) == (KeyKind.USER, SEED)


def test_a_signature_is_of_one_key_and_one_text() -> None:
    """This is how the broker knows a user."""
    pair, other = KeyPair.generate(KeyKind.USER), KeyPair.generate(KeyKind.USER)
    signature = pair.sign(b"nonce")
    assert verifies(pair.public, b"nonce", signature)
    assert not verifies(other.public, b"nonce", signature)
    assert not verifies(pair.public, b"another", signature)


@pytest.mark.parametrize("text", ["", "SUA", SEED[:-1] + "A", SEED.lower(), "é", SEED[1:]])
def test_what_is_no_seed_is_refused_without_showing_it(text: str) -> None:
    """The message lands in a log, and one wrong letter leaves a secret that can be guessed."""
    with pytest.raises(InvalidKey, match="no seed of NATS") as refused:
        KeyPair.from_seed(text)
    assert not text or text not in str(refused.value)


def test_a_seed_of_another_kind_is_refused() -> None:
    """An account's seed among users' files is the key to all of them."""
    with pytest.raises(InvalidKey, match="that of an account, not of a user"):
        KeyPair.from_seed(KeyPair.generate(KeyKind.ACCOUNT).seed, KeyKind.USER)


@pytest.mark.parametrize("text", ["", "UAA", SEED, "U" * 56])
def test_what_is_no_public_key_is_refused(text: str) -> None:
    """Revocation lists and imports name public keys."""
    with pytest.raises(InvalidKey, match="no public key"):
        kind_of(text)


def test_a_pair_shows_no_seed() -> None:
    """It is printed by loggers and debuggers."""
    pair = KeyPair.from_seed(SEED)
    assert SEED not in repr(pair)
    assert pair.public in repr(pair)
