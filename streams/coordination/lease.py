"""Leadership by a lease in a KV bucket: one holder at a time, who loses it unless it is renewed.

The bucket's age limit removes a lease that is not renewed, so a standby takes over within the
lease's time and one retry. A holder stops relying on its lease before the broker removes it. Of
several candidates only the one that the lease is meant for (`is_wanted`) asks for it; another
candidate that holds it gives it up.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping

import structlog

from streams import subjects
from streams.broker.connection import Broker, StoreRefused
from streams.coordination import lease_bucket
from streams.coordination.lease_bucket import (
    DELETE_HEADERS,
    RENEWALS_PER_LEASE,
    STREAM,
    LeaseBucket,
)
from streams.errors import BrokerUnavailable
from streams.headers import EXPECTED_LAST
from streams.topology import Scale

log = structlog.get_logger()

_TRUSTED_SHARE = 0.8  # of the lease's time, for which its holder relies on it


class Lease:
    """A named lease as one candidate sees it; `run` keeps trying to get and keep it.

    The candidate asks for it only while `is_wanted()`; call `wake` when that has changed. `gained`
    is set while the lease is held.
    """

    def __init__(
        self,
        broker: Broker,
        name: str,
        holder: str,
        seconds: float,
        scale: Scale,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self.is_wanted = is_wanted
        self._broker, self._seconds = broker, seconds
        self._bucket = LeaseBucket(broker, seconds, scale)
        self._key = subjects.escape(name)
        self._subject = lease_bucket.key_subject(self._key)
        self._holder_mark = f"{holder}.{secrets.token_hex(8)}".encode()
        self._revision = 0
        self._held_until = 0.0
        self._wakeups = asyncio.Event(), asyncio.Event()  # of `run` and of `wait_until_lost`
        self.gained = asyncio.Event()

    @property
    def is_held(self) -> bool:
        """True while no other candidate can hold it."""
        return time.monotonic() < self._held_until

    def wake(self) -> None:
        """Check again whether the lease is wanted: that may have changed."""
        for wakeup in self._wakeups:
            wakeup.set()

    async def run(self) -> None:
        """Acquire and renew until cancelled; sets `gained` whenever the lease becomes ours."""
        while True:
            asked_at = time.monotonic()
            if self.is_wanted() and await self._try_acquire():
                if not self.gained.is_set():
                    log.info("lease_gained", lease=self._key)
                self._held_until = asked_at + self._seconds * _TRUSTED_SHARE
                self.gained.set()
            elif not self.is_held:
                self.gained.clear()
            await _wait_for_wakeup(self._wakeups[0], self._seconds / RENEWALS_PER_LEASE)

    async def wait_until_lost(self) -> None:
        """Return once the lease is no longer held, or no longer wanted: then `release` it."""
        while self.is_held and self.is_wanted():
            await _wait_for_wakeup(self._wakeups[1], self._held_until - time.monotonic())
        self.gained.clear()
        log.warning("lease_given_up" if self.is_held else "lease_lost", lease=self._key)

    async def release(self) -> None:
        """Give the lease up at once, so that a standby need not wait until it expires."""
        if not self.is_held:
            return
        self._held_until = 0.0
        try:
            await self._write(b"", self._revision, DELETE_HEADERS)
        except (BrokerUnavailable, StoreRefused) as error:
            log.warning("lease_not_released", lease=self._key, reason=str(error))

    async def _try_acquire(self) -> bool:
        try:
            await self._bucket.declare()
            return await self._acquire()
        except BrokerUnavailable as error:
            self._bucket.mark_undeclared()
            log.warning("lease_unanswered", lease=self._key, reason=str(error))
            return False

    async def _acquire(self) -> bool:
        """Write our mark by compare-and-set on the last revision we know.

        After a lost race, acquire the lease if it is free or ours already.
        """
        try:
            self._revision = await self._write(self._holder_mark, self._revision, {})
        except StoreRefused as refusal:
            if not refusal.is_conflict:
                raise BrokerUnavailable(f"the lease is refused: {refusal}") from refusal
            return await self._acquire_if_free()
        return True

    async def _acquire_if_free(self) -> bool:
        found = await self._broker.read(STREAM, {"last_by_subj": self._subject})
        last = found[0] if found else None
        free = last is None or DELETE_HEADERS.items() <= last.headers.items()
        ours = last is not None and last.data == self._holder_mark
        if not free and not ours:
            return False
        try:
            self._revision = await self._write(self._holder_mark, last.seq if last else 0, {})
        except StoreRefused:  # another candidate was faster
            return False
        return True

    async def _write(self, value: bytes, revision: int, headers: Mapping[str, str]) -> int:
        expecting = {**headers, EXPECTED_LAST: str(revision)}
        return (await self._broker.store(self._subject, value, expecting, repeats=True)).seq


async def _wait_for_wakeup(wakeup: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(0.01, seconds)):
            await wakeup.wait()
    except TimeoutError:
        return
    wakeup.clear()
