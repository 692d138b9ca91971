"""The embedded broker's health: one that has given up streams is started again, once that helps.

What nats-server could not write for want of room it gives up. It says so at /healthz, and goes on
only after a restart, which is in vain as long as the disk is full.
"""

import asyncio
import shutil
from pathlib import Path

import structlog

from millstream.up import broker
from millstream.up.child import Child

log = structlog.get_logger()

LOOK_SECONDS = 2.0
ILL_LOOKS = 3
RESERVE_BYTES = 16 * 2**20  # less is as good as full


class Health:
    """What a broker has said of itself in its present life. Pure."""

    def __init__(self, life: int) -> None:
        """In this life it has been well already: it has served everybody's start."""
        self._life, self._was_well = life, True
        self._complaints = 0  # in a row

    def hear(self, life: int, complaint: str | None) -> bool:
        """Take in a look at it (None: no answer); whether it has fallen ill just now."""
        if life != self._life:
            self._life, self._was_well, self._complaints = life, False, 0
        self._was_well |= complaint == ""
        self._complaints = self._complaints + 1 if complaint else 0
        return self.is_ill and self._complaints == ILL_LOOKS

    @property
    def is_ill(self) -> bool:
        """It was well, and complains for `ILL_LOOKS` looks in a row: it is not starting up."""
        return self._was_well and self._complaints >= ILL_LOOKS


async def keep_well(nats: Child, store: Path, seconds: float) -> None:
    """Restart the broker when it is ill and its disk has room; runs until cancelled.

    `seconds` is how long it may take to end before it is killed.
    """
    health = Health(nats.pid)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        complaint = await broker.complaint(store, nats.pid)
        if health.hear(nats.pid, complaint):
            log.error("broker_ill", reason=complaint, free_bytes=_free(store))
        if health.is_ill and _free(store) >= RESERVE_BYTES:
            log.warning("broker_restarts", reason=complaint)
            await nats.restart(seconds)


def _free(store: Path) -> int:
    """Bytes that can be written; none where the directory is gone, or cannot be asked for."""
    try:
        return shutil.disk_usage(store).free
    except OSError:
        return 0
