"""Records of keys and of the deny-list, and the pepper's seal."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from registry.credentials.key_pepper import Pepper, PepperUnreadable, read_pepper
from registry.credentials.key_records import Denial, is_in_networks
from registry.credentials.keys import make_key
from registry.tenant_records import ApiKey

PEPPER = Pepper(b"p" * 32)


@pytest.mark.parametrize(
    ("address", "networks", "is_in"),
    [
        ("10.1.2.3", (), True),
        ("10.1.2.3", ("10.0.0.0/8",), True),
        ("::ffff:10.1.2.3", ("10.0.0.0/8",), True),
        ("11.1.2.3", ("10.0.0.0/8", "fd00::/8"), False),
        ("fd00::1", ("10.0.0.0/8", "fd00::/8"), True),
        ("", ("10.0.0.0/8",), False),
        ("testclient", ("0.0.0.0/0",), False),
    ],
)
def test_networks(address: str, networks: tuple[str, ...], is_in: bool) -> None:
    """An address that is none is in no network."""
    assert is_in_networks(address, networks) is is_in


def test_a_network_with_host_bits_is_refused() -> None:
    """It could be meant as one address or as all of them."""
    with pytest.raises(ValidationError, match="host bits"):
        make_key(ApiKey(tenant="acme", networks=("10.0.0.1/8",)), PEPPER, 0.0)


def test_a_record_has_rights_and_no_secret() -> None:
    """What is stored cannot be used as a key; another pepper seals it otherwise."""
    rights = ApiKey(tenant="acme", scopes=("infer",), tokens_per_day=7, expires_at=9.0)
    text, record = make_key(rights, PEPPER, 5.0)
    assert (record.tenant, record.scopes, record.tokens_per_day) == ("acme", ("infer",), 7)
    assert (record.id, record.name, record.created_at) == (text.id, text.id, 5.0)
    assert text.secret not in record.model_dump_json()
    assert record.seal == PEPPER.seal(text.id, text.secret)
    assert record.seal != Pepper(b"q" * 32).seal(text.id, text.secret)


def test_a_denial_is_about_one_thing() -> None:
    """Of two entries about the same the later one counts."""
    with pytest.raises(ValidationError, match="not both"):
        Denial(issuer="i", subject="s", token_id="t", created_at=0)
    first = Denial(issuer="i", subject="s", created_at=0)
    later = Denial(issuer="i", subject="s", not_before=5, created_at=1)
    assert first.id == later.id != Denial(issuer="i", token_id="s", created_at=0).id
    assert first.covers(1e12)
    assert (later.covers(4.9), later.covers(5.0)) == (True, False)


def test_a_pepper_is_read_from_a_file(tmp_path: Path) -> None:
    """With a sentence for each way in which that can fail."""
    file = tmp_path / "pepper"
    with pytest.raises(PepperUnreadable, match="No such file"):
        read_pepper(file)
    file.write_text("short\n")
    with pytest.raises(PepperUnreadable, match="has 5 bytes, it needs 32"):
        read_pepper(file)
    file.write_text("p" * 32 + "\n")
    assert read_pepper(file) == PEPPER
    assert "ppp" not in repr(PEPPER)
