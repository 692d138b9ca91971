"""The admin service's own key opens its API; managed keys are in the integration tests."""

import time
from typing import cast

import pytest

from admin.admin_keys import AdminKeys
from admin.caller import Caller
from api.authentication.authenticator import Authenticator
from api.wrong_keys import BURST
from registry.credentials.key_format import KeyText
from registry.credentials.keys import Keys
from registry.tenants import Tenants
from streams.broker.broker_client import Broker
from streams.errors import InsufficientScope, TooManyWrongKeys, Unauthenticated

UNKNOWN = pytest.param(str(KeyText.mint()), id="a managed key that nobody stored")
WRONG = [None, "", "sk-", "sk-12", "SK-1", "sk-1\udcff", UNKNOWN, "ms_"]


def admin_keys(keys: dict[str, str]) -> AdminKeys:
    """Own keys, and no managed ones."""
    broker = cast(Broker, None)  # records that are never opened ask none
    none = Authenticator(Tenants(broker), Keys(broker), None, (), time.time, refuses_weak=False)
    return AdminKeys(keys, none)


async def test_a_key_leads_to_its_holder_who_may_do_everything() -> None:
    """The log says who changed what, and never the key."""
    keys = admin_keys({"sk-1": "up", "sk-2": "ci"})
    found = [await keys.authenticate(key, "a") for key in ("sk-1", "sk-2")]
    assert found == [Caller("up", ("admin",), "a"), Caller("ci", ("admin",), "a")]


@pytest.mark.parametrize("key", WRONG)
async def test_anything_else_is_refused(key: str | None) -> None:
    """In a sentence without the key."""
    with pytest.raises(Unauthenticated) as refused:
        await admin_keys({"sk-1": "up"}).authenticate(key, "a")
    assert not key or key == "ms_" or key not in str(refused.value)


async def test_without_a_key_nobody_comes_in_and_is_told_why() -> None:
    """The remedy is in the sentence."""
    with pytest.raises(Unauthenticated, match="MILLSTREAM_ADMIN_KEY"):
        await admin_keys({}).authenticate("sk-1", "a")


async def test_guessing_is_slowed_for_its_address_alone() -> None:
    """The right key still opens where it did before, and elsewhere."""
    keys = admin_keys({"sk-1": "up"})
    assert (await keys.authenticate("sk-1", "a")).name == "up"
    for number in range(BURST + 1):
        with pytest.raises(Unauthenticated):
            await keys.authenticate(f"guess-{number}", "a")
    with pytest.raises(TooManyWrongKeys):
        await keys.authenticate("guess", "a")
    found = [(await keys.authenticate("sk-1", address)).name for address in ("a", "b")]
    assert found == ["up", "up"]


def test_the_scope_admin_has_all_others_and_they_have_only_themselves() -> None:
    """An operator's key is no way to make keys."""
    Caller("a", ("admin",)).check("operator")
    Caller("a", ("infer", "operator")).check("operator")
    for scopes in ((), ("operator",), ("infer", "models:read", "usage:read", "jobs")):
        with pytest.raises(InsufficientScope, match="'admin'"):
            Caller("a", scopes).check("admin")
