"""Managed keys in their bucket."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from registry.credentials.key_records import Denial
from registry.credentials.keys import KeyEnded, KeyNotFound
from tests.support.eventually import eventually
from tests.support.keys import PEPPER, Operator, operator


@pytest.fixture
async def op(nats_url: str) -> AsyncIterator[Operator]:
    async with operator(nats_url) as found:
        yield found


async def test_a_rotated_key_works_until_the_overlap_is_over(op: Operator) -> None:
    """The new one has its rights and name, and lives as long as it was to live."""
    _, old = await op.create(name="ci", scopes=("infer",), expires_at=op.now + 1000)
    text, new = await op.keys.rotate(old.id, PEPPER, op.now + 100, 60)
    assert (new.name, new.scopes, new.rotated_from) == ("ci", ("infer",), old.id)
    assert new.expires_at == pytest.approx(op.now + 1100)
    assert new.seal == PEPPER.seal(text.id, text.secret)
    found = op.keys.get(old.id)
    assert found
    assert found.expires_at == pytest.approx(op.now + 160)
    with pytest.raises(KeyEnded, match="expired"):
        await op.keys.rotate(old.id, PEPPER, op.now + 160, 60)


async def test_revoking_is_final(op: Operator) -> None:
    """And keeps the time of the first call."""
    _, key = await op.create()
    await op.keys.revoke(key.id, op.now)
    await op.keys.revoke(key.id, op.now + 5)
    found = op.keys.get(key.id)
    assert found
    assert found.revoked_at == op.now
    with pytest.raises(KeyEnded, match="revoked"):
        await op.keys.rotate(key.id, PEPPER, op.now, 60)


async def test_no_change_is_lost_to_another_one(nats_url: str, op: Operator) -> None:
    """Of two operators at the same time, each one's change is applied."""
    _, key = await op.create()
    async with operator(nats_url) as other:
        await asyncio.gather(
            op.keys.revoke(key.id, op.now), other.keys.set_disabled(key.id, is_disabled=True)
        )
        await eventually(lambda: op.keys.all == other.keys.all)
        found = other.keys.get(key.id)
        assert found
        assert (found.revoked_at, found.is_disabled) == (op.now, True)


async def test_a_key_that_is_not_there_cannot_be_changed(op: Operator) -> None:
    """The error has its id."""
    for change in (op.keys.revoke("none", 0), op.keys.set_disabled("none", is_disabled=True)):
        with pytest.raises(KeyNotFound, match="'none'"):
            await change
    with pytest.raises(KeyNotFound):
        await op.keys.rotate("none", PEPPER, 0, 0)


async def test_the_deny_list_covers_issuer_subject_and_token(op: Operator) -> None:
    """Each alone; `not_before` spares what was issued later."""
    keys = op.keys

    def denied(subject: str = "ada", token_id: str | None = "t", issued_at: float = 10) -> bool:
        return keys.is_denied("i", subject, token_id, issued_at)

    assert not denied()
    token = Denial(issuer="i", token_id="t", created_at=0)
    await keys.deny(token)
    assert (denied(), denied(token_id=None), denied(token_id="u")) == (True, False, False)
    await keys.remove_denial(token.id)
    await keys.deny(Denial(issuer="i", subject="ada", not_before=10, created_at=0))
    assert (denied(), denied(issued_at=9), denied("eve", issued_at=9)) == (False, True, False)
    await keys.deny(Denial(issuer="i", created_at=0))
    assert denied("eve")
    assert not keys.is_denied("j", "ada", "t", 0)
