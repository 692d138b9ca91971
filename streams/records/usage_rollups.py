"""Usage roll-ups: what each tenant used by day, model and key, added up from the ledger.

Any process may add up what is new, at the same time as others: the sums of a tenant, day and model
are one message that says up to which sequence of the ledger it goes, and is replaced by
compare-and-set. The cursor says up to where all of them go. So every record is added once, and
nobody reads a month of records to tell its usage. What workers cost is summed by day and model in
the same way. Sums are exact integers.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, NamedTuple, Self, TypeVar

import structlog

from streams import quota_windows, subjects, topology
from streams.broker.broker_client import Broker, StoredMessage, StoreRefused
from streams.errors import BrokerUnavailable
from streams.headers import EXPECTED_LAST
from streams.messages import LedgerRecord
from streams.records.cost_sums import CostSums
from streams.records.ledger_checks import unpack_stored_record, unpack_stored_time
from streams.records.usage_sums import CostRow, UsageRow, UsageSums
from streams.records.worker_time import WorkerTime
from streams.usage_accounts import WorkerPrice

log = structlog.get_logger()
T = TypeVar("T")

# The broker recognises a second record of a request for so long, and none can come before that is
# over; a minute is for the time that a record takes to be stored.
ROLL_SECONDS = 60.0  # between two times that a gateway adds up what is new
ROLLED_RECORDS = 100  # at once: about 1 ms of the event loop
_CONFLICT_SECONDS = 0.02  # until a replica knows what another process has stored
_UNIQUE_MS = (topology.LOG_SECONDS - 60) * 1000
_PAGE = 1000  # messages
_MAX_BITS = 200  # of a sum: no honest one has so many
_Numbered = tuple[int, LedgerRecord]  # with its sequence in the ledger


Sums = UsageSums | CostSums
_Kind = tuple[str, str]  # key and currency of usage, worker type and currency of costs


class _Addition(NamedTuple):
    """Addition to the sums on a subject by one message of the ledger, with its sequence."""

    seq: int
    subject: str
    kind: _Kind
    sums: Sums

    def check(self) -> None:
        """Raise TypeError or ValueError if sums cannot have this, as of a forged record."""
        if not all(isinstance(name, str) for name in self.kind):
            raise TypeError(f"{self.kind} are no names")
        for number in vars(self.sums).values():
            _whole(number)


@dataclass(frozen=True)
class _DaySums:
    """Sums of one tenant, day and model, or costs of a day and model, by kind.

    They go up to the sequence `through` of the ledger.
    """

    through: int
    revision: int  # sequence of the message that has them; 0 if there is none yet
    sums: dict[_Kind, Sums]

    def to_json(self) -> bytes:
        rows = [[*kind, *vars(sums).values()] for kind, sums in self.sums.items()]
        return json.dumps({"through": self.through, "rows": rows}).encode()

    @classmethod
    def from_message(cls, message: StoredMessage) -> Self:
        """Return the sums of a message; none, with a log event, if it cannot be read."""
        make = CostSums if subjects.is_cost_rollup(message.subject) else UsageSums
        stored = _read_numbers(message)
        try:
            sums: dict[_Kind, Sums] = {
                (name, currency): make(*map(_whole, numbers))
                for name, currency, *numbers in stored["rows"]
            }
        except (ValueError, TypeError, KeyError) as error:
            log.error("rollup_unreadable", subject=message.subject, reason=repr(error))
            return cls(0, message.seq, {})
        return cls(stored["through"], message.seq, sums)


def _read_numbers(message: StoredMessage) -> dict[str, Any]:
    """The JSON of a roll-up or a cursor; from the beginning on, if it cannot be read.

    Whoever may add up may write anything, and nobody else may end for it.
    """
    try:
        stored: dict[str, Any] = json.loads(message.data)
        return {**stored, "through": _whole(stored["through"])}
    except (ValueError, TypeError, KeyError) as error:
        log.error("rollup_unreadable", subject=message.subject, reason=repr(error))
        return {"through": 0, "rows": []}


def _whole(number: object) -> int:
    """A number that was read; raises TypeError for anything else, ValueError for an absurd one."""
    if not isinstance(number, int):
        raise TypeError(f"{number!r} is no whole number")
    if number.bit_length() > _MAX_BITS:
        raise ValueError(f"a number has {number.bit_length()} bits, more than {_MAX_BITS}")
    return number


def _read_record(message: StoredMessage) -> _Numbered | None:
    """A ledger record with its sequence; None, with a log event, if it cannot be read."""
    record = _read(_unpack_request, message)
    return None if record is None else (message.seq, record)


def _unpack_request(message: StoredMessage) -> LedgerRecord:
    """Return a ledger record that can be added up; raises what its absurd values cause."""
    record = unpack_stored_record(message.subject, message.data)
    for addition in _request_additions(0, record):
        addition.check()
    return record


def _unpack_worker_time(message: StoredMessage) -> WorkerTime:
    """Return a record of a worker's time that can be added up; raises as `_unpack_request` does."""
    time = unpack_stored_time(message.subject, message.data)
    _worker_addition(0, time).check()
    return time


def _read(unpack: Callable[[StoredMessage], T], message: StoredMessage) -> T | None:
    try:
        return unpack(message)
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, OSError) as error:
        log.error("ledger_record_unreadable", seq=message.seq, reason=str(error))
        return None


def _request_additions(seq: int, record: LedgerRecord) -> Iterator[_Addition]:
    """Return a request's additions: usage on the day it was accepted, cost on the day it ended."""
    day = quota_windows.utc_day(record.accepted / 1000)
    subject = subjects.rollup(record.tenant, day, record.model)
    yield _Addition(seq, subject, (record.key, record.price_entry.currency), UsageSums.of(record))
    if record.compute_ns:
        day = quota_windows.utc_day(record.finished / 1000)
        subject = subjects.cost_rollup(day, record.model)
        kind = (record.worker_type, WorkerPrice.unpack(record.worker_price).currency)
        yield _Addition(seq, subject, kind, CostSums.of_request(record))


def _worker_addition(seq: int, time: WorkerTime) -> _Addition:
    subject = subjects.cost_rollup(quota_windows.utc_day(time.until / 1000), time.model)
    kind = (time.worker_type, WorkerPrice.unpack(time.worker_price).currency)
    return _Addition(seq, subject, kind, CostSums.of_worker(time))


def _is_late(record: LedgerRecord) -> bool:
    """True if it came so long after its request that it may be a second record of it.

    The broker recognises an earlier one.
    """
    return record.finished - record.accepted >= _UNIQUE_MS


def _plus(known: Sums | None, more: Sums) -> Sums:
    """The sum of two of the same class."""
    if isinstance(known, UsageSums) and isinstance(more, UsageSums):
        return known + more
    if isinstance(known, CostSums) and isinstance(more, CostSums):
        return known + more
    return more


class UsageRollups:
    """The roll-ups of all tenants, stored by the broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._lock = broker, asyncio.Lock()

    async def run(self) -> None:
        """Add up what is new every minute, until cancelled, so that a reader need not wait."""
        while True:
            await asyncio.sleep(ROLL_SECONDS)
            try:
                await self.roll_up()
            except (BrokerUnavailable, StoreRefused) as error:
                log.warning("usage_not_rolled_up", reason=str(error))

    async def roll_up(self) -> int:
        """Add all records that the ledger has now, and return the last sequence added so far.

        Idempotent; safe from several processes at once and when it is cancelled. Raises
        `BrokerUnavailable`, or `StoreRefused` if there is no room.
        """
        async with self._lock:
            return await self._roll_up()

    async def _roll_up(self) -> int:
        while True:
            cursor, revision = await self._read_cursor()
            page = await self._broker.read_filtered(topology.LEDGER, ">", cursor, ROLLED_RECORDS)
            if not page.messages:
                return cursor
            for subject, additions in (await self._group(page.messages)).items():
                await self._add(subject, additions)
            await self._advance(page.messages[-1].seq, revision)

    async def _read_cursor(self) -> tuple[int, int]:
        """The last sequence that all roll-ups include, and the sequence of the cursor itself."""
        found = await self._broker.read(topology.ROLLUPS, {"last_by_subj": subjects.ROLLUP_CURSOR})
        return (_read_numbers(found[0])["through"], found[0].seq) if found else (0, 0)

    async def _advance(self, through: int, revision: int) -> None:
        """Set the cursor; if another process was faster, its cursor counts."""
        data, headers = json.dumps({"through": through}).encode(), {EXPECTED_LAST: str(revision)}
        try:
            await self._broker.store(subjects.ROLLUP_CURSOR, data, headers)
        except StoreRefused as refusal:
            if not refusal.is_conflict:
                raise

    async def _group(self, found: Iterable[StoredMessage]) -> dict[str, list[_Addition]]:
        """Return the additions of the ledger's messages, in order, by the subject of the sums."""
        groups = defaultdict[str, list[_Addition]](list)
        requests = [each for each in found if subjects.is_ledger(each.subject)]
        for addition in await self._add_requests(requests):
            groups[addition.subject].append(addition)
        for message in found:
            if subjects.is_worker_time(message.subject) and (
                time := _read(_unpack_worker_time, message)
            ):
                addition = _worker_addition(message.seq, time)
                groups[addition.subject].append(addition)
        return {name: sorted(each, key=itemgetter(0)) for name, each in groups.items()}

    async def _add_requests(self, found: Iterable[StoredMessage]) -> list[_Addition]:
        """Return the additions of requests' ledger records, but for those that had one already."""
        readable = [numbered for message in found if (numbered := _read_record(message))]
        repeated = await self._find_repeated([each for each in readable if _is_late(each[1])])
        for seq, record in readable:
            if seq in repeated:
                log.warning("ledger_record_repeated", request_id=record.request_id, seq=seq)
        return [
            addition
            for seq, record in readable
            if seq not in repeated
            for addition in _request_additions(seq, record)
        ]

    async def _find_repeated(self, late: Sequence[_Numbered]) -> set[int]:
        """Return the sequences of those records whose request has an earlier one in the ledger."""
        by_subject = defaultdict[str, list[_Numbered]](list)
        for seq, record in late:
            by_subject[subjects.ledger(record.tenant, record.model)].append((seq, record))
        repeated: set[int] = set()
        for subject, records in by_subject.items():
            first = await self._find_first(subject, records)
            repeated |= {seq for seq, record in records if first[record.request_id] < seq}
        return repeated

    async def _find_first(self, subject: str, records: Sequence[_Numbered]) -> dict[str, int]:
        """Return by request id the sequence of its first record, for the requests of `records`."""
        first = {record.request_id: seq for seq, record in reversed(records)}
        since = min(record.accepted for _, record in records)
        query: dict[str, int | str] = {
            "next_by_subj": subject,
            "start_time": datetime.fromtimestamp(since / 1000, UTC).isoformat(),
            "batch": _PAGE,
        }
        while True:
            page = await self._broker.read_page(topology.LEDGER, query)
            for message in page.messages:
                if (numbered := _read_record(message)) and numbered[1].request_id in first:
                    name = numbered[1].request_id
                    first[name] = min(first[name], message.seq)
            if not page.remaining or page.messages[-1].seq >= records[-1][0]:
                return first
            query = {"next_by_subj": subject, "seq": page.messages[-1].seq + 1, "batch": _PAGE}

    async def _add(self, subject: str, additions: Sequence[_Addition]) -> None:
        """Add to the sums on a subject what they do not have yet."""
        while True:
            known = await self._read_sums(subject)
            sums = dict(known.sums)
            fresh = [each for each in additions if each.seq > known.through]
            if not fresh:
                return
            for each in fresh:
                sums[each.kind] = _plus(sums.get(each.kind), each.sums)
            wanted = _DaySums(additions[-1].seq, known.revision, sums)
            headers = {EXPECTED_LAST: str(known.revision)}
            try:
                await self._broker.store(subject, wanted.to_json(), headers)
            except StoreRefused as refusal:
                if not refusal.is_conflict:
                    raise
                await asyncio.sleep(_CONFLICT_SECONDS)
            else:
                return

    async def _read_sums(self, subject: str) -> _DaySums:
        found = await self._broker.read(topology.ROLLUPS, {"last_by_subj": subject})
        return _DaySums.from_message(found[0]) if found else _DaySums(0, 0, {})

    async def read(self, tenant: str, days: Iterable[str]) -> list[UsageRow]:
        """Return what a tenant used on these days of UTC, as far as it has been added up.

        Raises `BrokerUnavailable`.
        """
        rows: list[UsageRow] = []
        for day in days:
            pattern = subjects.rollups_of(tenant, day)
            for message in await self._broker.read_subject(topology.ROLLUPS, pattern):
                _, _, model = subjects.parse_rollup(message.subject)
                stored = _DaySums.from_message(message)
                for kind, sums in stored.sums.items():
                    assert isinstance(sums, UsageSums)
                    rows.append(UsageRow(day, model, *kind, sums))
        return rows

    async def read_costs(self, days: Iterable[str]) -> list[CostRow]:
        """Return what workers cost on these days of UTC, as far as it has been added up.

        Raises `BrokerUnavailable`.
        """
        rows: list[CostRow] = []
        for day in days:
            pattern = subjects.cost_rollups_of(day)
            for message in await self._broker.read_subject(topology.ROLLUPS, pattern):
                _, _, model = subjects.parse_rollup(message.subject)
                for kind, sums in _DaySums.from_message(message).sums.items():
                    assert isinstance(sums, CostSums)
                    rows.append(CostRow(day, model, *kind, sums))
        return rows
