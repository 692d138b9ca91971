"""What a worker's gauges tell."""

from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from gpu_worker import metrics
from gpu_worker.attempt.terminals import FinishedRequest
from gpu_worker.engines.engine_stats import EngineStats
from gpu_worker.engines.step_timer import measure
from gpu_worker.metrics import ENGINE_STATS, observe_finished, observe_heartbeat
from streams.messages import Heartbeat, LedgerRecord
from streams.subjects import OTHER, InvalidToken, token

BEAT = Heartbeat("w", "m", "1", 3, 100, 1, 0, 4, 1000, 0, 0.0)


def test_each_version_has_its_own_credit() -> None:
    """A worker may serve two of one model; each has an engine of its own."""
    for version, free in (("1", 3), ("2", 1)):
        observe_heartbeat(replace(BEAT, version=version, free_sequences=free))
    name = "millstream_worker_free_sequences"
    told = [REGISTRY.get_sample_value(name, {"model": "m", "version": v}) for v in ("1", "2")]
    assert told == [3, 1]


def test_what_an_engine_counts_is_shown_while_it_is_loaded() -> None:
    """An operator sees whether KV is what is short, and where a step's time goes."""
    stats = EngineStats(preemptions=2, query_tokens=100, hit_tokens=64, kv_used=48, kv_cached=16)
    with measure(stats, "forward"):
        pass
    ENGINE_STATS.set_stats("m", "1", stats)
    stats.preemptions += 1
    assert counted("preemptions_total") == 3, "what it has counted by the time of the scrape"
    assert (counted("query_tokens_total"), counted("hit_tokens_total")) == (100, 64)
    assert [counted("kv_tokens", state=s) for s in ("used", "cached", "free")] == [48, 16, 0]
    assert counted("step_seconds_total", part="forward") == stats.seconds["forward"] > 0
    ENGINE_STATS.set_stats("m", "1", None)
    assert counted("preemptions_total") is None


def test_an_adapter_is_not_counted_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is called `other` has a series of its own, beside those that have none."""
    monkeypatch.setattr(metrics, "MOST_ADAPTERS", 1)
    monkeypatch.setattr(metrics, "_adapters", set())
    record = LedgerRecord("id", "acme", "labels", "1", "stop", 1, 1, 1, "w", 0, 0)
    for adapter in ("other", "late", "later"):
        observe_finished(FinishedRequest(replace(record, adapter=adapter), {}))
    name = "millstream_worker_adapter_requests_total"
    labels = {"model": "labels", "outcome": "stop"}
    told = [REGISTRY.get_sample_value(name, {**labels, "adapter": a}) for a in ("other", OTHER)]
    assert told == [1, 2]
    with pytest.raises(InvalidToken):  # as a name of an adapter would be
        token(OTHER)


def counted(name: str, **labels: str) -> float | None:
    pool = {"model": "m", "version": "1"}
    return REGISTRY.get_sample_value(f"millstream_worker_{name}", {**pool, **labels})
