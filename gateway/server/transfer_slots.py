"""Transfer slots: bound how many files a gateway sends and takes in at once.

Each transfer holds some memory. Pure.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from streams.errors import TooManyTransfers

TRANSFERS = 64  # each holds 4 chunks of 512 KiB: 128 MiB in all
TRANSFERS_OF_TENANT = 16


class TransferSlots:
    """Counts the files that this gateway sends and takes in, by tenant."""

    def __init__(self) -> None:
        self._by_tenant = Counter[str]()

    @contextmanager
    def take(self, tenant: str) -> Iterator[None]:
        """Count one transfer of a tenant for the time of the `with` block.

        Raises `TooManyTransfers` if the tenant, or all tenants together, have as many as they may.
        """
        if self._by_tenant[tenant] >= TRANSFERS_OF_TENANT:
            raise TooManyTransfers(f"{TRANSFERS_OF_TENANT} files of this tenant are under way here")
        if self._by_tenant.total() >= TRANSFERS:
            raise TooManyTransfers(f"{TRANSFERS} files are under way at this gateway")
        self._by_tenant[tenant] += 1
        try:
            yield
        finally:
            self._by_tenant[tenant] -= 1
            self._by_tenant += Counter[str]()  # which forgets those at 0
