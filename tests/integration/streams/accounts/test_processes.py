"""What each process does all day works over its one connection, in an account without JetStream."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig

from streams import subjects, topology
from streams.accounts import access
from streams.accounts.access import ROLES, UserClass
from streams.accounts.rights import Pins
from streams.headers import EXPECTED_LAST, INCREMENT, MESSAGE_ID, REQUEST_INFO
from streams.subjects import PoolKey, Priority
from tests.support.accounts_cell import AccountClient, AccountsCell, admin_api
from tests.support.eventually import eventually

POOL = PoolKey("mock", "v1", Priority.BATCH)
WORKER = Pins(id="w1", pools=(("mock", "v1"),))
WORKER_SUBJECT = subjects.work_placed_on("mock", "v1", "w1").replace("*", "batch")


class Heard:
    """What a client has heard on some subjects."""

    def __init__(self) -> None:
        self.messages: list[Msg] = []

    async def on(self, message: Msg) -> None:
        self.messages.append(message)

    @property
    def subjects(self) -> list[str]:
        return [each.subject for each in self.messages]


async def listen(client: AccountClient, *wanted: str) -> Heard:
    heard = Heard()
    for subject in wanted:
        await client.subscribe(subject, cb=heard.on)
    await client.flush()
    return heard


async def pull(client: AccountClient, stream: str, config: ConsumerConfig) -> Msg:
    """Make a consumer, as its reader does, and pull one message from it."""
    await client.jetstream().add_consumer(stream, config)
    query = json.dumps({"batch": 1, "expires": 5_000_000_000}).encode()
    subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{config.durable_name}"
    return await client.request(subject, query, timeout=5, old_style=True)


async def read(client: AccountClient, stream: str, **query: Any) -> list[Msg]:
    """A direct get of several messages."""
    found: list[Msg] = []
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    await client.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(query).encode(), reply=inbox)
    while (message := await answers.next_msg(5)).headers is None or (
        "Status" not in message.headers
    ):
        found.append(message)
    await answers.unsubscribe()
    return found


async def test_a_request_walks_through_all_processes(everywhere: AccountsCell) -> None:
    """Queue, dispatch, claim, tokens, ledger: each hop crosses from one account to another."""
    log = "infer.token.0.acme.gw-g1.r1"
    async with (
        everywhere.client(UserClass.GATEWAY, "g1") as gateway,
        everywhere.client(UserClass.DISPATCHER, "d1", node=-1) as dispatcher,
        everywhere.client(UserClass.WORKER, "w1", WORKER, node=-1) as worker,
    ):
        replies = await listen(gateway, subjects.replies_to("gw-g1"), subjects.ALL_BILLED)
        ended = await listen(dispatcher, subjects.billed_of("mock"))

        lane = "infer.request.acme.mock.batch"
        queued = await gateway.ask(lane, b"request", **{MESSAGE_ID: "acme.1"})
        assert queued == {"stream": "REQUESTS", "seq": queued["seq"]}
        again = await gateway.ask(lane, b"request", **{MESSAGE_ID: "acme.1"})
        assert again["duplicate"]

        index = topology.index_consumer("mock", "leader")
        request = await pull(dispatcher, topology.REQUESTS, index)
        (stored,) = await read(dispatcher, topology.REQUESTS, seq=queued["seq"], batch=1)
        assert stored.data == b"request"
        assert (await dispatcher.ask(subjects.work(POOL), stored.data))["stream"] == "WORK"
        await request.ack_sync()

        work = await pull(worker, topology.WORK, topology.work_consumer(POOL, 10))
        for expected, record in enumerate((b"started", b"chunk")):
            written = await worker.ask(log, record, **{EXPECTED_LAST: str(expected)})
            assert written["seq"] == expected + 1
        lost = await worker.ask(log, b"late", **{EXPECTED_LAST: "1"})
        assert lost["error"]["err_code"] == 10071
        await worker.ask("infer.ledger.acme.mock", b"record", **{MESSAGE_ID: "r1"})
        await work.ack_sync()

        reply = "infer.reply.acme.gw-g1.r1"
        await eventually(lambda: replies.subjects == [reply, reply, "infer.billed.acme.mock"])
        await eventually(lambda: ended.subjects == ["infer.billed.acme.mock"])
        assert [m.data for m in await read(gateway, "TOKENS_0", next_by_subj=log, seq=1, batch=9)]
        state = await dispatcher.jetstream().consumer_info(topology.WORK, work_name())
        assert (state.num_pending, state.num_ack_pending) == (0, 0)


def work_name() -> str:
    return topology.work_consumer(POOL, 10).durable_name or ""


async def test_the_states_that_a_worker_may_ask_for_name_no_tenants(declared: AccountsCell) -> None:
    """With a filter, a stream's state has its subjects; the clock's stream is one that all ask."""
    async with (
        declared.client(UserClass.GATEWAY, "g1") as gateway,
        declared.client(UserClass.DISPATCHER, "d1") as dispatcher,
        declared.client(UserClass.WORKER, "w1", WORKER) as worker,
    ):
        stored = {
            gateway: ("infer.request.acme.mock.batch", "infer.cancel.acme.r1"),
            dispatcher: (subjects.work(POOL), "infer.token.0.acme.gw.r1", "infer.ledger.acme.mock"),
            worker: ("infer.attempt.acme.r1",),
        }
        for client, filled in stored.items():
            for subject in filled:
                assert "seq" in await client.ask(subject, b"x")
        streams = [c.name for c in topology.stream_configs(topology.Scale(), 1)]
        asked = {f"$JS.API.STREAM.INFO.{stream}" for stream in (*streams, *access.BUCKETS)}
        allowed = asked - await worker.refused_to_publish(asked)
        assert f"$JS.API.STREAM.INFO.{topology.CLOCK}" in allowed
        told = [await worker.ask(each, b'{"subjects_filter": ">"}') for each in allowed]
    assert any(subjects.work(POOL) in each["state"].get("subjects", {}) for each in told)
    assert "acme" not in json.dumps(told)


async def test_a_worker_pulls_its_own_placements_and_no_other_models(
    declared: AccountsCell,
) -> None:
    """A stolen worker reads the work of its models: not what is meant for others."""
    other = topology.work_consumer(PoolKey("other", "v1", Priority.BATCH), 10)
    own = topology.worker_consumer("mock", "v1", "w1", 10)
    async with (
        declared.client(UserClass.DISPATCHER, "d1") as dispatcher,
        declared.client(UserClass.WORKER, "w1", WORKER) as worker,
    ):
        await dispatcher.ask(WORKER_SUBJECT, b"placed")
        assert (await pull(worker, topology.WORK, own)).data == b"placed"
        await dispatcher.ask("infer.work.other.v1.batch.any", b"another's")
        await dispatcher.jetstream().add_consumer(topology.WORK, other)
        wanted = {
            f"$JS.API.CONSUMER.MSG.NEXT.WORK.{other.durable_name}",
            f"$JS.API.CONSUMER.CREATE.WORK.{work_name()}.infer.work.other.v1.batch.any",
            f"$JS.API.CONSUMER.CREATE.WORK.{work_name()}",
            f"$JS.API.CONSUMER.DURABLE.CREATE.WORK.{work_name()}",
            "$JS.API.CONSUMER.CREATE.WORK",
        }
        assert await worker.refused_to_publish(wanted) == wanted
        widened = topology.work_consumer(POOL, 10)
        widened.filter_subject = "infer.work.>"
        subject = f"$JS.API.CONSUMER.CREATE.WORK.{work_name()}.{subjects.work(POOL)}"
        body = {"stream_name": "WORK", "config": widened.as_dict()}
        answer = await worker.ask(subject, json.dumps(body).encode())
        assert answer["error"]["err_code"] in (10131, 10132)  # the filter is not the subject's


async def test_views_follow_buckets_and_only_the_admin_service_writes_them(
    declared: AccountsCell,
) -> None:
    """A gateway that could write tenants' records could give anybody a key."""
    async with (
        declared.client(UserClass.ADMIN, "a1") as admin,
        declared.client(UserClass.GATEWAY, "g1") as gateway,
        declared.client(UserClass.WORKER, "w1", WORKER) as worker,
    ):
        changes = await listen(gateway, "infer.changed.tenants.>", "infer.changed.registry.>")
        seen = await listen(worker, "infer.changed.registry.>")
        for key in ("tenants.acme", "registry.model"):
            assert (await admin.ask(f"$KV.{key}", b"record", **{EXPECTED_LAST: "0"}))["seq"] == 1
        await eventually(lambda: len(changes.messages) == 2 and len(seen.messages) == 1)
        found = await read(gateway, "KV_tenants", next_by_subj="$KV.tenants.>", seq=1, batch=1000)
        assert [each.data for each in found] == [b"record"]
        info = await worker.jetstream().stream_info("KV_registry")
        assert info.state.messages == 1
        assert await gateway.refused_to_publish(["$KV.tenants.x"]) == {"$KV.tenants.x"}
        assert await worker.refused_to_publish(["$KV.registry.x"]) == {"$KV.registry.x"}


async def test_leaders_lease_and_count(declared: AccountsCell) -> None:
    """By compare-and-set on a bucket, and by counters that the broker keeps."""
    async with (
        declared.client(UserClass.DISPATCHER, "d1") as dispatcher,
        declared.client(UserClass.GATEWAY, "g1") as gateway,
    ):
        taken = await dispatcher.ask("$KV.leases.dispatcher.mock", b"d1", **{EXPECTED_LAST: "0"})
        assert taken["stream"] == "KV_leases"
        late = await dispatcher.ask("$KV.leases.dispatcher.mock", b"d2", **{EXPECTED_LAST: "0"})
        assert late["error"]["err_code"] == 10071
        usage = "infer.usage.acme.tenant.tokens.2026-11-21"
        totals = [(await gateway.ask(usage, b"", **{INCREMENT: "+5"}))["val"] for _ in range(2)]
        assert totals == ["5", "10"]


async def test_questions_cross_accounts_and_nobody_is_told_at_once(
    declared: AccountsCell,
) -> None:
    """A dispatcher learns of a dead worker by the broker's answer that nobody listens."""
    async with (
        declared.client(UserClass.DISPATCHER, "d1") as dispatcher,
        declared.client(UserClass.GATEWAY, "g1") as gateway,
        declared.client(UserClass.OPERATOR, "o1") as operator,
    ):
        assert await dispatcher.ask("infer.alive.w1") is None
        async with declared.client(UserClass.WORKER, "w1", WORKER) as worker:

            async def answer(message: Msg) -> None:
                await worker.publish(message.reply, b'"w1"')

            async def answer_report(message: Msg) -> None:
                await dispatcher.publish(message.reply, b'"d1"')

            for subject in ("infer.alive.w1", "infer.written.w1", subjects.WRITTEN_BY_ANY):
                await worker.subscribe(subject, cb=answer)
            await worker.subscribe("infer.find.*.*", cb=answer)
            await dispatcher.subscribe("infer.report.mock", cb=answer_report)
            beats = await listen(dispatcher, "infer.fleet.mock.*")
            mustered = await listen(worker, "infer.muster.mock")
            await asyncio.gather(worker.flush(), dispatcher.flush())

            assert await dispatcher.ask("infer.alive.w1") == "w1"
            for subject in ("infer.written.w1", subjects.WRITTEN_BY_ANY, "infer.find.acme.r1"):
                assert await gateway.ask(subject) == "w1"
            assert await operator.ask("infer.report.mock") == "d1"
            await worker.publish("infer.fleet.mock.w1", b"beat")
            await dispatcher.publish("infer.muster.mock")
            await eventually(lambda: len(beats.messages) == len(mustered.messages) == 1)
        await eventually(lambda: _nobody(dispatcher, "infer.alive.w1"))


async def _nobody(client: AccountClient, subject: str) -> bool:
    """Whether the broker says so; a question asked just as a listener leaves has no answer."""
    with suppress(nats.errors.TimeoutError):
        return await client.ask(subject) is None
    return False


async def test_who_knows_a_request_is_found_among_services_without_workers(
    declared: AccountsCell,
) -> None:
    """The question goes to two accounts: that nobody listens in one is no answer of the other."""
    async with (
        declared.client(UserClass.DISPATCHER, "d1") as dispatcher,
        declared.client(UserClass.GATEWAY, "g1") as gateway,
    ):

        async def answer(message: Msg) -> None:
            await asyncio.sleep(0)
            await dispatcher.publish(message.reply, b'"known"')

        await dispatcher.subscribe("infer.find.*.*", cb=answer)
        await dispatcher.flush()
        for _ in range(20):
            assert await gateway.ask("infer.find.acme.r1") == "known"


async def test_the_admin_service_hears_what_is_missing_and_what_is_deleted(
    declared: AccountsCell,
) -> None:
    """It alone declares; all others ask it, each from an account of its own."""
    async with declared.client(UserClass.ADMIN, "a1") as admin:
        heard = await listen(admin, subjects.DECLARE, "$JS.EVENT.ADVISORY.STREAM.DELETED.*")

        async def report(message: Msg) -> None:
            if message.reply:
                await admin.publish(message.reply, b'"report"')

        await admin.subscribe(subjects.DECLARE, cb=report)
        await admin.flush()
        for user_class in (UserClass.GATEWAY, UserClass.WORKER, UserClass.OPERATOR):
            async with declared.client(user_class, f"{user_class}-1") as client:
                await client.publish(subjects.DECLARE)
                assert await client.ask(subjects.DECLARE) == "report"
        await admin_api(admin, "DEAD").delete_stream("DEAD")
        await admin_api(admin, "CHECKPOINTS").delete_stream("CHECKPOINTS")
        await eventually(lambda: len(heard.messages) == 8)
        assert sorted(heard.subjects)[:2] == [
            "$JS.EVENT.ADVISORY.STREAM.DELETED.CHECKPOINTS",
            "$JS.EVENT.ADVISORY.STREAM.DELETED.DEAD",
        ]


async def test_jetstream_is_there_for_every_process(everywhere: AccountsCell) -> None:
    """Without an import of this question each server answers it by itself: there is none."""
    for user_class in ROLES:
        for node in range(len(everywhere.nodes)):
            async with everywhere.client(user_class, "p1", node=node) as client:
                for _ in range(10):
                    assert (await client.ask("$JS.API.INFO"))["streams"] > 0
            everywhere.directory.user_file("p1").unlink()


async def test_a_dispatcher_hears_of_work_that_nobody_finished(declared: AccountsCell) -> None:
    """JetStream's advisory crosses accounts, too."""
    config = topology.work_consumer(POOL, 0.1)
    config.max_deliver = 1
    async with (
        declared.client(UserClass.DISPATCHER, "d1") as dispatcher,
        declared.client(UserClass.WORKER, "w1", WORKER) as worker,
    ):
        heard = await listen(dispatcher, "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.WORK.*")
        await dispatcher.ask(subjects.work(POOL), b"poison")
        await pull(worker, topology.WORK, config)
        again = {"batch": 1, "expires": 1_000_000_000}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.WORK.{work_name()}"

        async def given_up() -> bool:
            await worker.publish(subject, json.dumps(again).encode(), reply=worker.new_inbox())
            await asyncio.sleep(0.1)
            return bool(heard.messages)

        await eventually(given_up)
        seq = json.loads(heard.messages[0].data)["stream_seq"]
        query = json.dumps({"seq": seq}).encode()
        assert (await dispatcher.ask("$JS.API.STREAM.MSG.GET.WORK", query))["message"]["seq"] == seq
        assert (await dispatcher.ask("$JS.API.STREAM.MSG.DELETE.WORK", query))["success"]


async def test_the_admin_service_is_told_who_asks(declared: AccountsCell) -> None:
    """By the servers: what a user says of itself does not count."""
    async with (
        declared.client(UserClass.ADMIN) as admin,
        declared.client(UserClass.OPERATOR, "ada") as ada,
    ):

        async def answer(message: Msg) -> None:
            await message.respond(json.dumps(dict(message.headers or {})).encode())

        await admin.subscribe(subjects.ALL_ADMIN, cb=answer)
        await admin.flush()
        forged = json.dumps({"acc": "ADMIN", "name_tag": "eve"})
        told = await ada.ask(subjects.admin("tenants.list"), b"", **{REQUEST_INFO: forged})
        info = json.loads(told[REQUEST_INFO])
        assert (info["name_tag"], info["host"]) == ("ada", "127.0.0.1")
