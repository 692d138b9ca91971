"""The embedded broker's health: one that has given up streams is started again, once that helps.

What nats-server could not write for want of room it gives up. It says so at /healthz, and goes on
only after a restart, which is in vain as long as the disk is full.
"""

import asyncio
import shutil
from pathlib import Path

import structlog

from millstream.up import nats_server
from millstream.up.child_process import ChildProcess

log = structlog.get_logger()

CHECK_SECONDS = 2.0
UNHEALTHY_CHECKS = 3
RESERVE_BYTES = 16 * 2**20  # less is as good as full


class NatsHealth:
    """What a broker has said of itself in its present life. Pure."""

    def __init__(self, life: int) -> None:
        """In this life it has been well already: it has served everybody's start."""
        self._pid, self._was_healthy = life, True
        self._failed_checks = 0  # in a row

    def record_check(self, life: int, complaint: str | None) -> bool:
        """Take in a look at it (None: no answer); whether it has fallen ill just now."""
        if life != self._pid:
            self._pid, self._was_healthy, self._failed_checks = life, False, 0
        self._was_healthy |= complaint == ""
        self._failed_checks = self._failed_checks + 1 if complaint else 0
        return self.is_unhealthy and self._failed_checks == UNHEALTHY_CHECKS

    @property
    def is_unhealthy(self) -> bool:
        """It was well, and complains for `ILL_LOOKS` looks in a row: it is not starting up."""
        return self._was_healthy and self._failed_checks >= UNHEALTHY_CHECKS


async def restart_when_unhealthy(nats: ChildProcess, store: Path, seconds: float) -> None:
    """Restart the broker when it is ill and its disk has room; runs until cancelled.

    `seconds` is how long it may take to end before it is killed.
    """
    health = NatsHealth(nats.pid)
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        complaint = await nats_server.fetch_health_error(store, nats.pid)
        if health.record_check(nats.pid, complaint):
            log.error("broker_unhealthy", reason=complaint, free_bytes=_free_bytes(store))
        if health.is_unhealthy and _free_bytes(store) >= RESERVE_BYTES:
            log.warning("broker_restarting", reason=complaint)
            await nats.restart(seconds)


def _free_bytes(store: Path) -> int:
    """Bytes that can be written; none where the directory is gone, or cannot be asked for."""
    try:
        return shutil.disk_usage(store).free
    except OSError:
        return 0
