"""Prometheus metrics of which models a worker has loaded, and which it could not."""

from prometheus_client import Counter, Gauge

LOAD_FAILURES = Counter(
    "millstream_worker_load_failures_total",
    "Models not loaded: `not_registered`, `refused`, `not_permitted`, `too_large`, `load`.",
    ["model", "reason"],
)
MODELS = Gauge(
    "millstream_worker_models",
    "Models: `loaded`, `not_loaded` (none needs it now), `failed`.",
    ["state"],
)


def observe_models(loaded: int, served: int, failed: int) -> None:
    """Set the gauges of how many models are loaded, of those that are served, and have failed."""
    MODELS.labels("loaded").set(loaded)
    MODELS.labels("not_loaded").set(served - loaded)
    MODELS.labels("failed").set(failed)
