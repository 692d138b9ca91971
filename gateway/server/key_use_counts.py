"""Counts the uses of each key at this gateway until they are stored. Pure."""

from collections import Counter

from registry.tenant_records import ApiKey


class KeyUseCounts:
    """Uses of managed keys by tenant and key id: bounded by the number of keys."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[str, str]]()

    def record(self, tenant: str, key: ApiKey) -> None:
        """Count one request or handshake; keys without a record of their own are not counted."""
        if key.id:
            self._counts[tenant, key.id] += 1

    def take(self) -> dict[tuple[str, str], int]:
        """Return the counts, and begin anew."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)
