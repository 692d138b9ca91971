"""Restarts the embedded nats-server when it reports itself unhealthy and its disk has room.

When nats-server cannot write a stream for lack of disk space, it stops serving that stream. It
reports this at /healthz and recovers only by a restart, which is in vain while the disk is full.
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
RESERVE_BYTES = 16 * 2**20  # with less free space a disk counts as full


class NatsHealth:
    """Judges from a row of checks whether the nats-server is unhealthy. Pure."""

    def __init__(self, pid: int) -> None:
        """Begin with the server of process id `pid`, which counts as healthy.

        All services have started with it.
        """
        self._pid, self._was_healthy = pid, True
        self._failed_checks = 0  # in a row

    def record_check(self, pid: int, error: str | None) -> bool:
        """Record the result of one check; return True if the server has just become unhealthy.

        `error` is what `fetch_health_error` returned: an empty text means healthy, and None no
        answer, which ends a row of failed checks as well. A `pid` other than before is a restarted
        server, which is not judged before its first healthy check.
        """
        if pid != self._pid:
            self._pid, self._was_healthy, self._failed_checks = pid, False, 0
        self._was_healthy |= error == ""
        self._failed_checks = self._failed_checks + 1 if error else 0
        return self.is_unhealthy and self._failed_checks == UNHEALTHY_CHECKS

    @property
    def is_unhealthy(self) -> bool:
        """True after `UNHEALTHY_CHECKS` failed checks in a row of a server that was healthy before.

        A server that is still starting is therefore not unhealthy.
        """
        return self._was_healthy and self._failed_checks >= UNHEALTHY_CHECKS


async def restart_when_unhealthy(nats: ChildProcess, store: Path, seconds: float) -> None:
    """Check nats-server every two seconds, and restart it when it is unhealthy, until cancelled.

    The server is restarted only while the disk of `store` has room, because a restart does not help
    while the disk is full. `seconds` is how long the server may take to end before it is killed.
    """
    health = NatsHealth(nats.pid)
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        error = await nats_server.fetch_health_error(store, nats.pid)
        if health.record_check(nats.pid, error):
            log.error("broker_unhealthy", reason=error, free_bytes=_free_bytes(store))
        if health.is_unhealthy and _free_bytes(store) >= RESERVE_BYTES:
            log.warning("broker_restarting", reason=error)
            await nats.restart(seconds)


def _free_bytes(store: Path) -> int:
    """Free bytes on the disk; 0 if the directory is gone or cannot be read."""
    try:
        return shutil.disk_usage(store).free
    except OSError:
        return 0
