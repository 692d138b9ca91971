"""Asks a machine's metadata service whether the machine is taken back, and drains it in time."""

import asyncio

import structlog

from gpu_worker.drain_controller import DrainController
from gpu_worker.metrics import METADATA_ERRORS, RECLAIM_NOTICES
from gpu_worker.reclaim.metadata_client import MetadataUnavailable
from gpu_worker.reclaim.notice_sources import NoticeSource
from gpu_worker.reclaim.reclaim_notice import ReclaimNotice
from streams.broker.broker_client import Broker

log = structlog.get_logger()

LOOK_SECONDS = 1.0  # between questions: Azure's advice; AWS's is five
MARGIN_SECONDS = 1.0  # of the notice, for the process to end
# The longest notice that any of the three gives; one whose clock is wrong counts as this
LONGEST_NOTICE_SECONDS = 120.0


class ReclaimWatch:
    """Waits for a notice that this machine is taken back, and starts the worker's drain then."""

    def __init__(self, broker: Broker, source: NoticeSource, drain: DrainController) -> None:
        self._broker, self._source, self._drain = broker, source, drain
        self._trouble = ""
        self._has_hint = False
        self._notice: ReclaimNotice | None = None

    async def run(self) -> None:
        """Ask until there is a notice; then start a drain that ends a second before it, and return.

        What the service cannot answer is logged once, counted, and asked again; a hint is logged
        once.
        """
        while self._notice is None:
            await self._look()
            if self._notice is None:
                await asyncio.sleep(LOOK_SECONDS)
        left = self._notice.ends_at - self._broker.clock.now()
        left = min(max(left, 0.0), LONGEST_NOTICE_SECONDS)
        log.warning("reclaim_notice", action=self._notice.action, seconds_left=round(left, 1))
        RECLAIM_NOTICES.labels("notice").inc()
        self._drain.start_reclaim(max(0.0, left - MARGIN_SECONDS))

    async def acknowledge(self) -> None:
        """Tell the provider that the worker has drained, if there was a notice; best effort."""
        if self._notice is None:
            return
        try:
            await self._source.acknowledge(self._notice)
        except MetadataUnavailable as error:
            log.warning("reclaim_not_acknowledged", reason=str(error))

    async def _look(self) -> None:
        try:
            found = await self._source.look()
        except MetadataUnavailable as error:
            METADATA_ERRORS.inc()
            if self._trouble != (trouble := str(error)):
                self._trouble = trouble
                log.warning("metadata_unavailable", reason=trouble)
            return
        self._trouble = ""
        if found and found.is_hint:
            self._note_hint(found)
        else:
            self._notice = found

    def _note_hint(self, hint: ReclaimNotice) -> None:
        if not self._has_hint:
            self._has_hint = True
            log.info("reclaim_hint", action=hint.action)
            RECLAIM_NOTICES.labels("hint").inc()
