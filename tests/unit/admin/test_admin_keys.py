"""Who may use the admin API."""

import pytest

from admin.admin_keys import AdminKeys
from api.wrong_keys import BURST
from streams.errors import TooManyWrongKeys, Unauthenticated

WRONG = [None, "", "sk-", "sk-12", "SK-1", "sk-1\udcff"]


def test_a_key_leads_to_its_holders_name() -> None:
    """The log says who changed what, and never the key."""
    keys = AdminKeys({"sk-1": "up", "sk-2": "ci"})
    assert [keys.authenticate(key, "a") for key in ("sk-1", "sk-2")] == ["up", "ci"]


@pytest.mark.parametrize("key", WRONG)
def test_anything_else_is_refused(key: str | None) -> None:
    """In a sentence without the key."""
    with pytest.raises(Unauthenticated) as refused:
        AdminKeys({"sk-1": "up"}).authenticate(key, "a")
    assert not key or key not in str(refused.value)


def test_without_a_key_nobody_comes_in_and_is_told_why() -> None:
    """An empty key is no key."""
    with pytest.raises(Unauthenticated, match="MILLSTREAM_ADMIN_KEY"):
        AdminKeys({}).authenticate("", "a")


def test_guessing_is_slowed_for_its_address_alone() -> None:
    """The right key still opens where it did before, and elsewhere."""
    keys = AdminKeys({"sk-1": "up"})
    assert keys.authenticate("sk-1", "a") == "up"
    for number in range(BURST + 1):
        with pytest.raises(Unauthenticated):
            keys.authenticate(f"guess-{number}", "a")
    with pytest.raises(TooManyWrongKeys):
        keys.authenticate("guess", "a")
    assert [keys.authenticate("sk-1", address) for address in ("a", "b")] == ["up", "up"]
