"""What a worker's gauges tell."""

from dataclasses import replace

from prometheus_client import REGISTRY

from gpu_worker.metrics import observe_beat
from streams.messages import Beat

BEAT = Beat("w", "m", "1", 3, 100, 1, 0, 4, 1000, 0, 0.0)


def test_each_version_has_its_own_credit() -> None:
    """A worker may serve two of one model; each has an engine of its own."""
    for version, free in (("1", 3), ("2", 1)):
        observe_beat(replace(BEAT, version=version, free_sequences=free))
    name = "millstream_worker_free_sequences"
    told = [REGISTRY.get_sample_value(name, {"model": "m", "version": v}) for v in ("1", "2")]
    assert told == [3, 1]
