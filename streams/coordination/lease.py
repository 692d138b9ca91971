"""Leadership by a lease in a KV bucket: one holder at a time, who loses it unless it is renewed.

The bucket's age limit removes a lease that is not renewed, so a standby takes over within the
lease's time and one retry. A holder stops relying on its lease before the broker removes it. Of
several candidates only the one that the lease is meant for (`is_wanted`) asks for it; another
candidate that holds it gives it up.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog

from streams import subjects
from streams.broker.broker_client import Broker, StoreRefused
from streams.coordination import lease_bucket
from streams.coordination.lease_bucket import (
    DELETE_HEADERS,
    STREAM,
    LeaseBucket,
)
from streams.errors import BrokerUnavailable
from streams.headers import EXPECTED_LAST

log = structlog.get_logger()

_TRUSTED_SHARE = 0.8  # of the lease's time, for which its holder relies on it


class Lease:
    """A named lease (leadership for a limited time) as one process that competes for it sees it.

    `run`, in a task, keeps trying to get the lease and then renews it; `gained` is set while it is
    held. The process asks for the lease only while `is_wanted()` returns True; call `wake` when
    that has changed. `holder` is this process's name, and `bucket` the bucket of the leases, whose
    values live for one lease. `answered` is set once it is known whether this process holds it.
    """

    def __init__(
        self,
        broker: Broker,
        name: str,
        holder: str,
        bucket: LeaseBucket,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self.is_wanted = is_wanted
        self._broker, self._bucket = broker, bucket
        self._key = subjects.escape(name)
        self._subject = lease_bucket.key_subject(self._key)
        self._holder_mark = f"{holder}.{secrets.token_hex(8)}".encode()
        self._revision = 0
        self._held_until = 0.0
        self._wakeups = asyncio.Event(), asyncio.Event()  # of `run` and of `wait_until_lost`
        self.gained = asyncio.Event()
        self.answered = asyncio.Event()

    @property
    def is_held(self) -> bool:
        """True while this process holds the lease and no other process can hold it.

        If renewals fail, this turns False before the broker removes the lease.
        """
        return time.monotonic() < self._held_until

    def wake(self) -> None:
        """Call `is_wanted()` again now, in `run` and in `wait_until_lost`; returns at once."""
        for wakeup in self._wakeups:
            wakeup.set()

    async def run(self) -> None:
        """Acquire the lease while it is wanted, and renew it while it is held, until cancelled.

        Sets `gained` when this process gets the lease. If the broker does not answer, that is
        logged and tried again. Raises `TopologyMismatch` if the broker refuses the bucket of the
        leases. Cancelling does not give the lease up: call `release`.
        """
        while True:
            asked_at = time.monotonic()
            if self.is_wanted() and await self._try_acquire():
                if not self.gained.is_set():
                    log.info("lease_gained", lease=self._key)
                self._held_until = asked_at + self._bucket.seconds * _TRUSTED_SHARE
                self.gained.set()
            elif not self.is_held:
                self.gained.clear()
            await _wait_for_wakeup(self._wakeups[0], self._bucket.renew_seconds)

    async def wait_until_lost(self) -> None:
        """Wait until the lease is no longer held or no longer wanted.

        Clears `gained`. Call `release` afterwards, since a lease that is no longer wanted is still
        held.
        """
        while self.is_held and self.is_wanted():
            await _wait_for_wakeup(self._wakeups[1], self._held_until - time.monotonic())
        self.gained.clear()
        log.warning("lease_given_up" if self.is_held else "lease_lost", lease=self._key)

    async def run_while_held(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends, or is cancelled because the lease is lost.

        What it raises is not raised here: it must tell of its own failures.
        """
        running = asyncio.create_task(work, name=f"work-{self._key}")
        losing = asyncio.create_task(self.wait_until_lost(), name=f"lost-{self._key}")
        try:
            await asyncio.wait({running, losing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (running, losing):
                task.cancel()
            await asyncio.gather(running, losing, return_exceptions=True)

    async def release(self) -> None:
        """Give the lease up now, so that another process need not wait until it expires.

        Does nothing if it is not held. If the broker does not answer, that is only logged, and the
        lease expires.
        """
        if not self.is_held:
            return
        self._held_until = 0.0
        try:
            await self._write(b"", self._revision, DELETE_HEADERS)
        except (BrokerUnavailable, StoreRefused) as error:
            log.warning("lease_not_released", lease=self._key, reason=str(error))

    async def _try_acquire(self) -> bool:
        try:
            await self._bucket.open()
            is_ours = await self._acquire()
        except BrokerUnavailable as error:
            self._bucket.mark_unknown()
            log.warning("lease_unanswered", lease=self._key, reason=str(error))
            return False
        self.answered.set()
        return is_ours

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
