"""Stores in the ledger, once a minute and at the end, what of a worker's time is no request's."""

import asyncio
import secrets
from collections.abc import Mapping

import structlog

from gpu_worker.compute_meter import ComputeMeter, ComputeTimes
from gpu_worker.identity import WorkerIdentity
from gpu_worker.metrics import observe_worker_time
from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import BrokerUnavailable
from streams.headers import MESSAGE_ID
from streams.records.worker_time import WorkerTime

log = structlog.get_logger()

REPORT_SECONDS = 60.0


class ComputeReporter:
    """Stores the times of a worker's models; `identities` are by model.

    A record that the broker does not take is stored later, once, before there are new ones. So what
    a worker has not told when it is killed is its last minute at most, or an outage.
    """

    def __init__(
        self, broker: Broker, meter: ComputeMeter, identities: Mapping[str, WorkerIdentity]
    ) -> None:
        self._broker, self._meter, self._identities = broker, meter, identities
        self._since, self._numbers = broker.clock.now_ms(), 0
        self._process = secrets.token_hex(8)  # a name may be used again by another process
        self._unstored: list[tuple[str, WorkerTime]] = []  # with their message ids

    async def run(self) -> None:
        """Store what is new every minute, until cancelled."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            if not self._unstored:
                self._collect()
            await self._store()

    async def finish(self) -> None:
        """Store what is new for the last time; what requests have not recorded by now is lost."""
        self._collect(is_last=True)
        await self._store()

    def _collect(self, is_last: bool = False) -> None:
        until = self._broker.clock.now_ms()
        for model, times in self._meter.report(is_last).items():
            record = self._make_record(self._identities[model], until, times)
            self._unstored.append((f"{self._process}.{self._numbers}", record))
            self._numbers += 1
            observe_worker_time(record)
        self._since = until

    def _make_record(self, identity: WorkerIdentity, until: int, times: ComputeTimes) -> WorkerTime:
        return WorkerTime(
            worker=identity.worker,
            model=identity.model,
            version=identity.version,
            since=self._since,
            until=until,
            elapsed_ns=times.elapsed,
            idle_ns=times.idle,
            load_ns=times.load,
            lost_ns=times.lost,
            worker_type=identity.type,
            worker_price=identity.price,
        )

    async def _store(self) -> None:
        try:
            while self._unstored:
                message_id, record = self._unstored[0]
                await self._broker.store(record.subject, record.pack(), {MESSAGE_ID: message_id})
                del self._unstored[0]
        except (BrokerUnavailable, StoreRefused) as error:
            log.warning("worker_time_not_stored", records=len(self._unstored), reason=str(error))
