"""Membership of a group: each live process renews a mark in the bucket of the leases.

The bucket's age limit removes the mark of a member that is silent for one lease, so the membership
and the leases of a process that died go at the same time. When the broker was unreachable for so
long, no member's mark is left: then the earlier members are presumed alive for one more lease, in
which they can renew their marks.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from streams import subjects
from streams.broker.broker_client import Broker, StoredMessage, StoreRefused
from streams.coordination import lease_bucket
from streams.coordination.lease_bucket import (
    DELETE_HEADERS,
    STREAM,
    LeaseBucket,
)
from streams.errors import BrokerUnavailable

log = structlog.get_logger()


class Membership:
    """The live processes of one group, as one of them sees it; `run` keeps `members` current.

    `members` is empty until the broker has answered first. From then on it always contains this
    process, and it stays unchanged while the broker does not answer. `on_change` is called without
    arguments after each change. A member that is silent for as long as a value lives in `bucket`,
    the bucket of the leases, is removed.
    """

    def __init__(self, broker: Broker, group: str, member: str, bucket: LeaseBucket) -> None:
        self._broker, self._bucket = broker, bucket
        self._group = lease_bucket.key_subject("members", subjects.escape(group))
        self._member = member
        self._last_read_at = self._presumes_until = float("-inf")
        self.members: frozenset[str] = frozenset()
        self.on_change: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Renew this process's mark and read those of the others, until cancelled; never returns.

        If the broker does not answer, that is logged and tried again. Raises `TopologyMismatch` if
        the broker refuses the bucket of the leases.
        """
        while True:
            try:
                await self._bucket.open()
                await self._renew()
            except (BrokerUnavailable, StoreRefused) as error:
                self._bucket.mark_unknown()
                log.warning("membership_unknown", group=self._group, reason=str(error))
            await asyncio.sleep(self._bucket.renew_seconds)

    async def leave(self) -> None:
        """Delete this process's mark, so that the others see it leave before the mark expires.

        Stop `run` first, which would renew the mark. If the broker does not answer, that is only
        logged.
        """
        try:
            await self._write_mark(DELETE_HEADERS)
        except (BrokerUnavailable, StoreRefused) as error:
            log.warning("membership_not_left", group=self._group, reason=str(error))

    async def _renew(self) -> None:
        await self._write_mark({})
        found = await self._broker.read_subject(STREAM, f"{self._group}.*")
        left = {_name(mark) for mark in found if DELETE_HEADERS.items() <= mark.headers.items()}
        present = {_name(mark) for mark in found} - left
        members = frozenset(present | {self._member} | (self._presumed_members() - left))
        if members != self.members:
            self.members = members
            log.info("members_changed", group=self._group, members=sorted(members))
            self.on_change()

    def _presumed_members(self) -> frozenset[str]:
        """Return the members from before an outage of the broker, for one lease after its end."""
        now = time.monotonic()
        if now - self._last_read_at > self._bucket.seconds:
            self._presumes_until = now + self._bucket.seconds
        self._last_read_at = now
        return self.members if now < self._presumes_until else frozenset()

    async def _write_mark(self, headers: dict[str, str]) -> None:
        subject = f"{self._group}.{subjects.escape(self._member)}"
        await self._broker.store(subject, b"", headers, repeats=True)


def _name(mark: StoredMessage) -> str:
    return subjects.unescape(mark.subject.rpartition(".")[2])
