"""A small store with one of each: what must be the same wherever the streams are taken."""

from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client
from nats.js.api import ConsumerConfig, StreamConfig

LEDGER, KV, USAGE = "LEDGER", "KV_registry", "USAGE"
NAMES = (LEDGER, KV, USAGE)
_MESSAGES, _ACKED, _PENDING = 50, 4, 6


@dataclass(frozen=True)
class StreamFacts:
    """What a reader of the three streams finds; `consumer` is ack floor, un-acked, left."""

    sequences: dict[str, tuple[int, int, int]]
    first_payload: bytes
    consumer: tuple[int, int, int]
    revisions: dict[str, int]
    counter: bytes


async def fill_streams(client: Client, replicas: int = 1) -> None:
    """50 records, of which a consumer has had ten and acknowledged four; a bucket; a counter."""
    js = client.jetstream(timeout=10)
    await js.add_stream(StreamConfig(LEDGER, subjects=["infer.ledger.>"], num_replicas=replicas))
    for number in range(_MESSAGES):
        headers = {"Nats-Msg-Id": f"request-{number}"}
        await js.publish("infer.ledger.acme", f"{number}".encode() * 2000, headers=headers)
    bound = ConsumerConfig("judge", ack_wait=3600, max_ack_pending=100)
    await js.add_consumer(LEDGER, bound)
    pulled = await (await js.pull_subscribe_bind("judge", LEDGER)).fetch(_ACKED + _PENDING)
    for message in pulled[:_ACKED]:
        await message.ack_sync()
    await js.add_stream(
        StreamConfig(
            KV,
            subjects=["$KV.registry.>"],
            max_msgs_per_subject=1,
            num_replicas=replicas,
            allow_direct=True,
        )
    )
    for number in range(5):
        await js.publish(f"$KV.registry.model.m{number % 3}", f"{number}".encode())
    await js.add_stream(
        StreamConfig(
            USAGE, subjects=["infer.usage.>"], num_replicas=replicas, allow_msg_counter=True
        )
    )
    for step in ("7", "8"):
        await js.publish("infer.usage.acme", headers={"Nats-Incr": step})


async def read_facts(clients: dict[str, Client]) -> StreamFacts:
    """What is stored now; `clients` are by stream, since each may be in another account."""
    contexts = {name: client.jetstream(timeout=10) for name, client in clients.items()}
    states = {name: (await contexts[name].stream_info(name)).state for name in NAMES}
    judge = await contexts[LEDGER].consumer_info(LEDGER, "judge")
    assert judge.ack_floor
    revisions = {}
    for number in range(3):
        subject = f"$KV.registry.model.m{number}"
        revisions[subject] = (await contexts[KV].get_last_msg(KV, subject)).seq or 0
    counter = await contexts[USAGE].get_last_msg(USAGE, "infer.usage.acme")
    return StreamFacts(
        {name: (each.messages, each.first_seq, each.last_seq) for name, each in states.items()},
        (await contexts[LEDGER].get_msg(LEDGER, 1)).data or b"",
        (judge.ack_floor.stream_seq, judge.num_ack_pending or 0, judge.num_pending or 0),
        revisions,
        counter.data or b"",
    )


async def store_again(client: Client, number: int = 0) -> Any:
    """The acknowledgement of a record that was stored before, under the same id."""
    headers = {"Nats-Msg-Id": f"request-{number}"}
    return await client.jetstream(timeout=10).publish("infer.ledger.acme", b"x", headers=headers)
