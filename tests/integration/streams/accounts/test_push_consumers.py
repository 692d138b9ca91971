"""A consumer may send what is stored to any subject that its maker names: nobody obeys that.

Whoever may make a consumer names its `deliver_subject`, and no right of NATS speaks of that. So
listeners tell a delivery from what the broker itself says: it has the subject of what is stored.
"""

import json

import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from dispatcher.reconcile import dead_letters
from streams import signals, subjects, topology
from streams.accounts.access import UserClass
from streams.accounts.rights import BrokerAccount
from streams.broker.broker_client import connect
from streams.connection_files import ConnectionFiles
from streams.coordination import signal_handler
from streams.coordination.signal_handler import SignalHandler
from streams.subjects import PoolKey, Priority
from tests.support.accounts_cell import ANSWER_SECONDS, AccountClient, AccountsCell
from tests.support.eventually import eventually

POOL = PoolKey("mock", "v1", Priority.BATCH)
DRAIN = subjects.drain("w2")
# Who may send it, by whom it is obeyed, how it is read, and its body. Listeners import the second
# one by a subject without a wildcard
SIGNALS = {
    DRAIN: (UserClass.OPERATOR, UserClass.WORKER, signals.parse_drain, signals.pack_drain(0)),
    subjects.GONE: (UserClass.SUPERVISOR, UserClass.DISPATCHER, signals.parse_gone, b"w2"),
}


async def send_stored_work(thief: AccountClient, target: str) -> None:
    """Make a consumer of WORK that delivers to a subject of other processes."""
    config = topology.work_consumer(POOL, 10)
    config.deliver_subject = target
    body = json.dumps({"stream_name": topology.WORK, "config": config.as_dict()}).encode()
    subject = f"$JS.API.CONSUMER.CREATE.WORK.{config.name}.{subjects.work(POOL)}"
    answer = await thief.ask(subject, body)
    assert "error" not in answer, answer


@pytest.mark.parametrize("account", [BrokerAccount.SERVICES, BrokerAccount.WORKERS])
@pytest.mark.parametrize("signal", SIGNALS)
async def test_a_signal_that_a_consumer_delivers_is_ignored(
    everywhere: AccountsCell,
    account: BrokerAccount,
    signal: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if it was stored with the headers of a copy, as a dispatcher could; a copy is obeyed."""
    monkeypatch.setattr(signal_handler, "LOG_SECONDS", 0.0)
    sender_class, user_class, parse, body = SIGNALS[signal]
    obeyed: list[object] = []

    async def act(found: object) -> None:
        obeyed.append(found)

    file = everywhere.directory.add_user("w2", user_class)
    async with (
        connect(everywhere.nodes[0].url, "w2", ConnectionFiles(creds=file)) as listener,
        everywhere.client(UserClass.DISPATCHER, "d1", node=-1) as dispatcher,
        everywhere.client(sender_class, "o1", node=-1) as sender,
        everywhere.connected(everywhere.insider(account), node=-1) as thief,
    ):
        handler = SignalHandler[object](parse, act)
        await listener.subscribe(subjects.heard(signal), handler.receive)
        forged = {"Nats-Stream": topology.SIGNALS, "Nats-Subject": signal}
        await dispatcher.ask(subjects.work(POOL), body, **forged)
        with capture_logs() as logged:
            await send_stored_work(thief, subjects.heard(signal))
            await eventually(
                lambda: obeyed or [e for e in logged if e["event"] == "signal_ignored"]
            )
        assert obeyed == []
        await sender.ask(signal, body)
        await eventually(lambda: len(obeyed) == 1)


async def test_an_advisory_that_somebody_forges_is_none(everywhere: AccountsCell) -> None:
    """A gateway's thief has a stored message sent there, by reading it; else it could end work."""
    advisories = dead_letters.MAX_DELIVERIES_ADVISORIES.replace("*", "pool")
    body = json.dumps({"stream_seq": 7}).encode()
    heard: list[Msg] = []

    async def note(message: Msg) -> None:
        heard.append(message)

    async with (
        everywhere.client(UserClass.DISPATCHER, "d1") as dispatcher,
        everywhere.connected(everywhere.insider(BrokerAccount.SERVICES), node=-1) as thief,
    ):
        await dispatcher.subscribe(dead_letters.MAX_DELIVERIES_ADVISORIES, cb=note)
        await dispatcher.flush()
        stored = await thief.ask(subjects.work(POOL), body)
        query = json.dumps({"seq": stored["seq"]}).encode()
        await thief.publish("$JS.API.DIRECT.GET.WORK", query, reply=advisories)
        await eventually(lambda: len(heard) == 1)
        (forged,) = heard
        assert forged.data == body
        assert dead_letters.parse_advisory(forged.subject, forged.headers or {}, body) is None
        heard.clear()
        await use_up_deliveries(dispatcher)
        await eventually(lambda: heard)
    (told,) = {dead_letters.parse_advisory(m.subject, m.headers or {}, m.data) for m in heard}
    assert told == stored["seq"]


async def use_up_deliveries(client: AccountClient) -> None:
    """Make a consumer that delivers once, and let it try twice."""
    await client.ask(
        "$JS.API.CONSUMER.DELETE.WORK." + (topology.work_consumer(POOL, 10).name or "")
    )
    config = topology.work_consumer(POOL, 0.1)
    config.max_deliver = 1
    await client.jetstream().add_consumer(topology.WORK, config)
    pull = f"$JS.API.CONSUMER.MSG.NEXT.WORK.{config.name}"
    await client.request(pull, b'{"batch": 1}', timeout=ANSWER_SECONDS, old_style=True)
    await client.publish(pull, b'{"batch": 1, "expires": 30000000000}', reply=client.new_inbox())
