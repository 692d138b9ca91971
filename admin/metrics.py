"""Prometheus metrics of the admin service, with bounded labels."""

from collections.abc import Iterable

from prometheus_client import Counter, Gauge

OPERATIONS = Counter(
    "millstream_admin_requests_total",
    "Operations that were asked for, by how they ended.",
    ["operation", "outcome"],
)
UNAUTHENTICATED = Counter(
    "millstream_admin_unauthenticated_total",
    "Requests to the admin API without a key, with a wrong one, or with too many wrong ones.",
    ["code"],
)
DECLARING = Gauge(
    "millstream_admin_declaring", "1 while this process declares streams and buckets."
)
UNUSABLE = Gauge(
    "millstream_admin_unusable_stream", "Streams that the broker refuses to make.", ["stream"]
)
AUDIT_USED = Gauge(
    "millstream_audit_used_ratio", "Part of the audit log's size that is in use, 0 to 1."
)
ACCOUNT_UPDATES = Counter(
    "millstream_admin_account_updates_total",
    "Claims of tenants' accounts that the NATS servers were told, by how that ended.",
    ["outcome"],
)
UNTOLD_ACCOUNTS = Gauge(
    "millstream_admin_untold_accounts",
    "Accounts of tenants that not every NATS server has taken yet, at the service that leads.",
)


def observe_unusable(streams: Iterable[str]) -> None:
    """Export the streams that cannot be used; those that can be again disappear."""
    UNUSABLE.clear()
    for stream in streams:
        UNUSABLE.labels(stream).set(1)
