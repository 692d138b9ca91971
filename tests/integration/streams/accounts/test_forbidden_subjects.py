"""Publishing without the right fails at once, by whatever call, and says what to do."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streams import topology
from streams.accounts.access import UserClass
from streams.broker import broker_client, declaration, reconnecting_client
from streams.broker.broker_client import Broker
from streams.broker.inbox import Inbox
from streams.errors import NotPermitted
from streams.topology import Scale
from tests.support.accounts_server import AccountsServer, connect, process_files
from tests.support.eventually import eventually

FORBIDDEN = "infer.work.mock.v1.interactive.any"  # to operators: dispatchers publish there
NEVER = 3600.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AccountsServer]:
    """One whose log may name violations."""
    made = AccountsServer(tmp_path)
    yield made
    made.kill()


@pytest.fixture
async def operator(
    server: AccountsServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Broker]:
    """With calls that would wait for ever, were they not told."""
    monkeypatch.setattr(reconnecting_client, "Inbox", partial(Inbox, NEVER))
    monkeypatch.setattr(broker_client, "_READ_SECONDS", (NEVER,))
    async with connect(server.url) as observer:
        await declaration.declare(observer, Scale(), 100)
    files = process_files(server.url, UserClass.OPERATOR, "somebody")
    async with connect(server.url, "somebody", files) as broker:
        yield broker


async def purge(broker: Broker) -> None:
    await broker.call_api(lambda js: js.purge_stream(topology.WORK))


@pytest.mark.parametrize(
    ("act", "subject"),
    [
        (lambda broker: broker.store(FORBIDDEN, b""), FORBIDDEN),
        (lambda broker: broker.store_retrying(FORBIDDEN, b"", {}, NEVER), FORBIDDEN),
        (lambda broker: broker.get(topology.WORK, 1), "$JS.API.DIRECT.GET.WORK"),
        (purge, "$JS.API.STREAM.PURGE.WORK"),
    ],
)
async def test_a_call_ends_at_once_and_says_who_may_not_do_what(
    operator: Broker, act: Callable[[Broker], Awaitable[object]], subject: str
) -> None:
    """It looked like a broker that does not answer, for as long as anybody waits for that."""
    with capture_logs(), pytest.raises(NotPermitted) as refused:
        await act(operator)
    said = str(refused.value)
    assert said.startswith("the user 'operator-somebody' of the class operator may not publish to")
    assert f" {subject}: use the credentials of a class that may" in said
    assert not refused.value.may_have_succeeded


async def test_a_question_without_an_answer_is_logged_with_what_to_do(operator: Broker) -> None:
    """Commands show what is logged as an error."""
    with capture_logs() as logs:
        assert await operator.request("infer.muster.mock", seconds=NEVER) is None
        assert await operator.has_listener("infer.muster.mock", NEVER) is None
    (said,) = [entry for entry in logs if entry["event"] == "nats_not_permitted"]
    assert said["log_level"] == "error"
    assert "may not publish to infer.muster.mock: use the credentials" in said["reason"]


async def test_what_nobody_waits_for_is_logged_and_all_else_goes_on(operator: Broker) -> None:
    """A connection is not closed for it."""
    with capture_logs() as logs:
        await operator.publish("infer.muster.mock")
        await eventually(lambda: any(e["event"] == "nats_not_permitted" for e in logs))
        assert await operator.read(topology.DEAD, {"seq": 1}) == []
