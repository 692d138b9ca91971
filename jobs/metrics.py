"""Prometheus metrics of the jobs service."""

from prometheus_client import Counter, Gauge, Histogram

SWEPT_FILES = Counter(
    "millstream_swept_files_total", "Files whose bytes were removed from the store."
)
STORED_FILES = Gauge(
    "millstream_stored_files", "Files of all tenants, as of the last sweep, by state.", ["state"]
)
ITEMS = Counter("millstream_batch_lines_total", "Lines of batches by how they ended.", ["outcome"])
RESPONSES = Counter(
    "millstream_background_responses_total", "Background responses by how they ended.", ["status"]
)
PENDING_RESPONSES = Gauge(
    "millstream_pending_responses", "Responses that this process brings to their end."
)
RUNNING_BATCHES = Gauge("millstream_running_batches", "Batches that this process runs.")
WEBHOOK_EVENTS = Counter(
    "millstream_webhook_events_total",
    "Events for an endpoint, by whether they were queued, or dropped because it has too many.",
    ["outcome"],
)
WEBHOOK_ATTEMPTS = Counter(
    "millstream_webhook_attempts_total", "Attempts at webhooks by how they ended.", ["outcome"]
)
WEBHOOK_SECONDS = Histogram(
    "millstream_webhook_seconds",
    "How long an attempt took, to the head of the answer.",
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20),
)
PENDING_WEBHOOKS = Gauge(
    "millstream_pending_webhooks", "Webhooks that wait for an attempt; 0 where the lease is not."
)
