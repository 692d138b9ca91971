"""What a worker keeps of requests that have ended: enough to help, and no more."""

from typing import Any, cast

from gpu_worker.attempt.finished_logs import FinishedLogs
from streams.records.token_log import FinishedLog
from streams.subjects import LogAddress
from streams.topology import LOG_SECONDS

SIZE = 100


def kept(logs: FinishedLogs, request_id: str, now: float = 0.0, size: int = SIZE) -> FinishedLog:
    log = FinishedLog(cast(Any, None), LogAddress("acme", "gw", request_id), 1, bytes(size), 0)
    logs.add(log, now)
    return log


def test_the_newest_are_kept_up_to_so_many_bytes() -> None:
    """Memory is bounded by bytes, whatever the traffic."""
    logs = FinishedLogs(max_bytes=3 * SIZE)
    names = [f"{number:x}" for number in range(10)]
    made = [kept(logs, name) for name in names]
    assert [logs.get("acme", name, 0.0) for name in names] == [None] * 7 + made[7:]


def test_one_that_is_too_large_is_not_kept() -> None:
    """Others are, all the same."""
    logs = FinishedLogs(max_bytes=SIZE)
    kept(logs, "a", size=2 * SIZE)
    assert logs.get("acme", "a", 0.0) is None
    assert kept(logs, "b") is logs.get("acme", "b", 0.0)


def test_a_request_that_ends_twice_counts_once() -> None:
    """Its second attempt ran since the first one's log was lost."""
    logs = FinishedLogs(max_bytes=2 * SIZE)
    other = kept(logs, "b")
    for _ in range(5):
        last = kept(logs, "a")
    assert logs.get("acme", "a", 0.0) is last
    assert logs.get("acme", "b", 0.0) is other


def test_none_outlives_the_time_of_logs() -> None:
    """What the brokers would have forgotten by its age does not come back."""
    logs = FinishedLogs()
    kept(logs, "a", now=10.0)
    assert logs.get("acme", "a", 10.0 + LOG_SECONDS)
    assert logs.get("acme", "a", 10.1 + LOG_SECONDS) is None


def test_nobody_finds_anothers() -> None:
    """The tenant is a part of the name."""
    logs = FinishedLogs()
    kept(logs, "a")
    assert logs.get("other", "a", 0.0) is None
