"""Restarts the embedded nats-server when it reports itself unhealthy and its disk has room.

When nats-server cannot write a stream for lack of disk space, it stops serving that stream. It
reports this when asked for its health and recovers only by a restart, which is in vain while the
disk is full.
"""

import asyncio
import shutil
from pathlib import Path

import structlog

from millstream.up.broker_health import BrokerHealth
from millstream.up.child_process import ChildProcess

log = structlog.get_logger()

CHECK_SECONDS = 2.0
UNHEALTHY_CHECKS = 3
RESERVE_BYTES = 16 * 2**20  # with less free space a disk counts as full


class NatsHealth:
    """Decides from the results of successive health checks whether nats-server is unhealthy.

    One instance follows the server of one `millstream up` across restarts. Pure.
    """

    def __init__(self, pid: int) -> None:
        """Follow the server with process id `pid`.

        It counts as having been healthy, because all services have started with it.
        """
        self._pid, self._was_healthy = pid, True
        self._failed_checks = 0  # in a row

    def record_check(self, pid: int, error: str | None) -> bool:
        """Record the result of one check; return True if the server becomes unhealthy by it.

        `error` is what `BrokerHealth.fetch_error` returned. A text counts as a failed check; an
        empty text (healthy) or None (no answer) sets the count of failed checks in a row back to
        0. A `pid` other than before is that of a restarted server, which counts as unhealthy only
        after it has once been healthy. True is returned once, not at further failed checks in the
        same row.
        """
        if pid != self._pid:
            self._pid, self._was_healthy, self._failed_checks = pid, False, 0
        self._was_healthy |= error == ""
        self._failed_checks = self._failed_checks + 1 if error else 0
        return self.is_unhealthy and self._failed_checks == UNHEALTHY_CHECKS

    @property
    def is_unhealthy(self) -> bool:
        """True while the last 3 checks (`UNHEALTHY_CHECKS`) or more have failed in a row.

        Always False for a server that has not been healthy since its start.
        """
        return self._was_healthy and self._failed_checks >= UNHEALTHY_CHECKS


async def restart_when_unhealthy(
    nats: ChildProcess, broker: BrokerHealth, store: Path, seconds: float
) -> None:
    """Check nats-server's health every two seconds and restart it when it is unhealthy.

    Never returns; runs until cancelled. Unhealthy means that 3 checks in a row reported an error. A
    restart waits until the disk of the directory `store` has 16 MiB free, because it does not help
    while the disk is full. `seconds` is how long the old server may take to end before it is
    killed.
    """
    health = NatsHealth(nats.pid)
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        error = await broker.fetch_error()
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
