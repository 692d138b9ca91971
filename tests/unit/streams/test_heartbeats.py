"""A heartbeat is believed of the worker whose subject it came on, and of no other."""

from dataclasses import replace
from typing import Any

import pytest

from streams import subjects, topology
from streams.coordination.heartbeats import InvalidHeartbeat, parse_heartbeat
from streams.messages import Heartbeat
from streams.subjects import PoolKey, Priority

BEAT = Heartbeat("w1", "Qwen2.5", "v1", 4, 1000, 0, 0, 4, 1000, 0, 0.0)
SUBJECT = subjects.fleet("Qwen2.5", "w1")
POOL = topology.work_consumer(PoolKey("Qwen2.5", "v1", Priority.BATCH), 1).name
OWN = topology.worker_consumer("Qwen2.5", "v1", "w1", 1).name
REST = "1.7.7.1795886715669.0"


@pytest.mark.parametrize(
    "reply",
    [
        f"$JS.ACK.WORK.{POOL}.{REST}",
        f"$JS.ACK.WORK.{OWN}.{REST}",
        f"$JS.ACK._.hash.WORK.{OWN}.{REST}.token",
    ],
)
def test_its_own_deliveries_are_named(reply: str) -> None:
    """In both forms of ADR-15."""
    beat = replace(BEAT, taken=[reply])
    assert parse_heartbeat(SUBJECT, {}, beat.pack()) == beat


@pytest.mark.parametrize(
    "beat",
    [
        replace(BEAT, worker="w2"),
        replace(BEAT, model="other"),
        replace(BEAT, worker="*"),
        replace(BEAT, taken=["$KV.leases.dispatcher.x.1.7"]),
        replace(BEAT, taken=["infer.work.m.v.1.7"]),
        replace(BEAT, taken=[f"$JS.ACK.WORK.pool_other_v1_batch.{REST}"]),
        replace(BEAT, taken=[f"$JS.ACK.REQUESTS.{OWN}.{REST}"]),
        replace(BEAT, taken=["infer.gone"]),
    ],
)
def test_whoever_names_others_is_not_believed(beat: Heartbeat) -> None:
    """A leader gives a dead worker's deliveries back with its own rights, on any subject."""
    with pytest.raises(InvalidHeartbeat):
        parse_heartbeat(SUBJECT, {}, beat.pack())


@pytest.mark.parametrize(
    "change",
    [
        {"free_tokens": "many"},
        {"free_tokens": 2**60},
        {"kv_tokens": -1},
        {"running": 1.5},
        {"running": True},
        {"tokens_per_second": float("nan")},
        {"load": {"load_seconds": float("nan")}},
        {"load": {"load_seconds": "3"}},
        {"load": {7: 3.0}},
        {"load": [3.0]},
        {"tokens_per_second": float("inf")},
        {"pulled": [1]},
        {"pulled": {"batch": None}},
        {"room": {"batch": (1,)}},
        {"progress": [(1, 2, 3)]},
        {"progress": 7},
        {"taken": [7]},
        {"holds": b"x"},
        {"holds": "x" * 8},
        {"version": 7},
        {"type": 7},
        {"drained": {"finished": "all"}},
    ],
    ids=repr,
)
def test_numbers_that_no_worker_can_have_are_not_reckoned_with(change: dict[str, Any]) -> None:
    """A leader that fails on them serves nobody, whichever worker has sent them."""
    with pytest.raises(InvalidHeartbeat):
        parse_heartbeat(SUBJECT, {}, replace(BEAT, **change).pack())


def test_what_a_busy_worker_reports_is_believed() -> None:
    """More may wait than is free."""
    room = {"batch": (-3, -100), "interactive": (1, 50)}
    beat = replace(BEAT, free_sequences=-2, waiting=5, progress=[(7, 3)], tokens_per_second=1.5)
    beat = replace(beat, room=room, pulled={"batch": 7}, holds=b"x" * 16, drained={"finished": 1})
    assert parse_heartbeat(SUBJECT, {}, beat.pack()).free_capacity("batch") == (-3, -100)


@pytest.mark.parametrize("payload", [b"", b"{}", b"\x80", b"\xc1", BEAT.pack()[:-3]])
def test_what_cannot_be_read_is_none(payload: bytes) -> None:
    """Nor does it raise anything else."""
    with pytest.raises(InvalidHeartbeat):
        parse_heartbeat(SUBJECT, {}, payload)


def test_an_answer_of_the_broker_is_none() -> None:
    """Whoever may read a stored message can have it sent there."""
    with pytest.raises(InvalidHeartbeat):
        parse_heartbeat(SUBJECT, {"Nats-Stream": "ATTEMPTS"}, BEAT.pack())
