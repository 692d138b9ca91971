"""Credentials of another process, and clocks that are an hour off: a sentence with the remedy."""

import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streams.accounts import cell_directory
from streams.accounts.access import UserClass
from streams.accounts.credentials_file import InvalidCredentials, read_credentials
from streams.accounts.rights import Pins
from streams.accounts.user_revocation import UserRevocation
from streams.broker import authentication, reconnecting_client
from streams.broker.account_claims import push_claims
from streams.broker.broker_client import connect
from streams.connection_files import ConnectionFiles
from streams.errors import BrokerUnavailable, NotPermitted
from tests.support.accounts_cell import AccountsCell

HOUR = 3600.0


class OtherClock:
    """A machine's clock that is so many seconds off."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def time(self) -> float:
        return time.time() + self._seconds


async def refusal(cell: AccountsCell, file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence with which a first connection ends."""
    monkeypatch.setattr(reconnecting_client, "OPEN_SECONDS", 2.0)
    with pytest.raises((BrokerUnavailable, InvalidCredentials)) as caught, capture_logs():
        async with connect(cell.nodes[0].url, "w1", ConnectionFiles(creds=file)):
            pass
    return str(caught.value)


async def test_a_file_of_another_process_is_told_when_it_is_used(declared: AccountsCell) -> None:
    """One worker's file copied to the next one: no heartbeat of it is taken."""
    pins = Pins("w1", (("mock", "*"),))
    file = declared.directory.add_user("w1", UserClass.WORKER, pins)
    with capture_logs() as events:
        async with connect(declared.nodes[0].url, "w2", ConnectionFiles(creds=file)) as broker:
            with pytest.raises(NotPermitted, match="user 'w1' of the class worker.*its --id"):
                await broker.store("infer.fleet.mock.w2", b"")
    (told,) = [each for each in events if each["event"] == "nats_not_permitted"]
    assert "of this process: its --id and its models" in told["reason"]


async def test_a_clock_an_hour_ahead_takes_good_credentials_for_expired(
    cell: AccountsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence has both times."""
    file = cell.directory.add_user("w1", UserClass.WORKER, seconds=HOUR / 2)
    monkeypatch.setattr(authentication, "time", OtherClock(HOUR))
    said = await refusal(cell, file, monkeypatch)
    assert "expired at " in said
    assert "this machine's clock says " in said


async def test_a_clock_an_hour_behind_takes_expired_credentials_for_good(
    cell: AccountsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server knows better, and the sentence names the clock."""
    file = cell.directory.add_user("w1", UserClass.WORKER, seconds=-HOUR / 2)
    monkeypatch.setattr(authentication, "time", OtherClock(-HOUR))
    assert "this machine's clock is right" in await refusal(cell, file, monkeypatch)


async def test_a_user_made_by_a_clock_an_hour_ahead_is_revoked_all_the_same(
    cell: AccountsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claims are newer than those that cut it off; the next of its name is let in."""
    with monkeypatch.context() as patched:
        patched.setattr(cell_directory, "time", OtherClock(HOUR))
        stolen = read_credentials(cell.directory.add_user("w1", UserClass.WORKER), now=0)
    assert await cell.is_let_in(stolen)
    revoked = UserRevocation.open(cell.directory.path).revoke("w1")
    async with cell.client(UserClass.SYSTEM, "system") as system:
        await push_claims(system, revoked.token)
    assert not await cell.is_let_in(stolen)
    new = read_credentials(cell.directory.add_user("w1", UserClass.WORKER), now=0)
    assert await cell.is_let_in(new)
