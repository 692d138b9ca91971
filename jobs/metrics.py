"""Prometheus metrics of the jobs service."""

from prometheus_client import Counter, Gauge

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
