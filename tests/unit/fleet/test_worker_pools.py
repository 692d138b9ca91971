"""Load and pace of workers, by version and machine type."""

from dataclasses import replace

import pytest

from fleet.signals.worker_pools import HEARD_SECONDS, WorkerPools
from streams.messages import Heartbeat

BEAT = Heartbeat(
    worker="w1",
    model="mock",
    version="1",
    free_sequences=6,
    free_tokens=750,
    running=2,
    waiting=0,
    max_sequences=8,
    kv_tokens=1000,
    generated_tokens=0,
    tokens_per_second=40.0,
    type="small",
)


def test_workers_of_one_type_are_added_up() -> None:
    """Their pace is that of those that run something."""
    pools = WorkerPools()
    pools.record(BEAT, 0)
    pools.record(replace(BEAT, worker="w2", running=0, free_tokens=1000, tokens_per_second=0.0), 0)
    pools.record(replace(BEAT, worker="w3", type="large", tokens_per_second=90.0), 0)
    large, small = pools.measure()
    assert (large.type, large.workers, large.pace) == ("large", 1, 90.0)
    assert (small.type, small.workers, small.running, small.pace) == ("small", 2, 2, 40.0)
    assert small.batch_fill == pytest.approx(2 / 16)
    assert small.kv_fill == pytest.approx(250 / 2000)


def test_a_draining_worker_takes_no_work_and_is_no_full_one() -> None:
    """It reports nothing free, which is no measure of what it holds."""
    pools = WorkerPools()
    pools.record(BEAT, 0)
    pools.record(replace(BEAT, worker="w2", draining=True, free_tokens=0, free_sequences=0), 0)
    (pool,) = pools.measure()
    assert (pool.workers, pool.draining, pool.running) == (1, 1, 4)
    assert pool.kv_fill == pytest.approx(0.25)


def test_a_worker_leaves_with_its_last_heartbeat_or_in_silence() -> None:
    """Its last heartbeat counts for three seconds."""
    pools = WorkerPools()
    pools.record(BEAT, 0)
    pools.record(replace(BEAT, worker="w2"), 1)
    pools.record(replace(BEAT, worker="w2", drained={"finished": 1}), 2)
    assert len(pools) == 1
    pools.expire(HEARD_SECONDS)
    assert pools.measure() == []


def test_a_pool_that_holds_nothing_has_no_pace() -> None:
    """Nobody knows how fast it would be; nor how full a worker without places is."""
    pools = WorkerPools()
    pools.record(replace(BEAT, running=0, max_sequences=0, kv_tokens=0, free_tokens=0), 0)
    (pool,) = pools.measure()
    assert (pool.pace, pool.batch_fill, pool.kv_fill) == (None, None, None)
