"""Usage roll-ups: what each tenant used by day, model and key, added up from the ledger.

Any process may add up what is new, at the same time as others: the sums of a tenant, day and model
are one message that says up to which sequence of the ledger it goes, and is replaced by
compare-and-set. The cursor says up to where all of them go. So every record is added once, and
nobody reads a month of records to tell its usage. Sums are exact integers.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple, Self

import structlog

from streams import quota_windows, subjects, topology
from streams.broker.broker_client import Broker, StoredMessage, StoreRefused
from streams.errors import BrokerUnavailable
from streams.headers import EXPECTED_LAST
from streams.messages import LedgerRecord
from streams.usage_accounts import format_amount

log = structlog.get_logger()

# The broker recognises a second record of a request for so long, and none can come before that is
# over; a minute is for the time that a record takes to be stored.
MAX_DAYS = 92
ROLL_SECONDS = 60.0  # between two times that a gateway adds up what is new
ROLLED_RECORDS = 100  # at once: about 1 ms of the event loop
_CONFLICT_SECONDS = 0.02  # until a replica knows what another process has stored
_UNIQUE_MS = (topology.LOG_SECONDS - 60) * 1000
_PAGE = 1000  # messages
_Numbered = tuple[int, LedgerRecord]  # with its sequence in the ledger


@dataclass(frozen=True)
class UsageSums:
    """Sums over requests; tokens as billed, `charge` in 10⁻¹² of the currency."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens
    completion_tokens: int = 0
    charge: int = 0

    @classmethod
    def of(cls, record: LedgerRecord) -> Self:
        """Return the sums of one request."""
        prompt, completion, cached = record.billed_tokens
        return cls(1, prompt, cached, completion, record.charge)

    def __add__(self, other: "UsageSums") -> "UsageSums":
        return UsageSums(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.charge + other.charge,
        )


class UsageRow(NamedTuple):
    """Sums of one key of a tenant, one model, one day of UTC and one currency."""

    day: str
    model: str
    key: str
    currency: str
    sums: UsageSums


@dataclass(frozen=True)
class _DaySums:
    """Sums of one tenant, day and model by key and currency, up to a sequence of the ledger."""

    through: int
    revision: int  # sequence of the message that has them; 0 if there is none yet
    sums: dict[tuple[str, str], UsageSums]

    def to_json(self) -> bytes:
        rows = [[*kind, *vars(sums).values()] for kind, sums in self.sums.items()]
        return json.dumps({"through": self.through, "rows": rows}).encode()

    @classmethod
    def from_message(cls, message: StoredMessage) -> Self:
        stored = json.loads(message.data)
        sums = {(key, currency): UsageSums(*n) for key, currency, *n in stored["rows"]}
        return cls(stored["through"], message.seq, sums)


def _read_record(message: StoredMessage) -> _Numbered | None:
    """A ledger record with its sequence; None, with a log event, if it cannot be read."""
    try:
        return message.seq, LedgerRecord.unpack(message.data)
    except (ValueError, TypeError) as error:
        log.error("ledger_record_unreadable", seq=message.seq, reason=str(error))
        return None


def _is_late(record: LedgerRecord) -> bool:
    """True if it came so long after its request that it may be a second record of it.

    The broker recognises an earlier one.
    """
    return record.finished - record.accepted >= _UNIQUE_MS


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
            page = await self._broker.read_filtered(
                topology.LEDGER, subjects.ALL_LEDGERS, cursor, ROLLED_RECORDS
            )
            if not page.messages:
                return cursor
            for kind, records in (await self._group(page.messages)).items():
                await self._add(kind, records)
            await self._advance(page.messages[-1].seq, revision)

    async def _read_cursor(self) -> tuple[int, int]:
        """The last sequence that all roll-ups include, and the sequence of the cursor itself."""
        found = await self._broker.read(topology.ROLLUPS, {"last_by_subj": subjects.ROLLUP_CURSOR})
        return (json.loads(found[0].data)["through"], found[0].seq) if found else (0, 0)

    async def _advance(self, through: int, revision: int) -> None:
        """Set the cursor; if another process was faster, its cursor counts."""
        data, headers = json.dumps({"through": through}).encode(), {EXPECTED_LAST: str(revision)}
        try:
            await self._broker.store(subjects.ROLLUP_CURSOR, data, headers)
        except StoreRefused as refusal:
            if not refusal.is_conflict:
                raise

    async def _group(self, found: Iterable[StoredMessage]) -> dict[str, list[_Numbered]]:
        """The records with their sequences, by the subject of the sums that they belong to."""
        readable = [numbered for message in found if (numbered := _read_record(message))]
        repeated = await self._find_repeated([each for each in readable if _is_late(each[1])])
        groups = defaultdict[str, list[_Numbered]](list)
        for seq, record in readable:
            if seq in repeated:
                log.warning("ledger_record_repeated", request_id=record.request_id, seq=seq)
                continue
            day = quota_windows.utc_day(record.accepted / 1000)
            groups[subjects.rollup(record.tenant, day, record.model)].append((seq, record))
        return groups

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

    async def _add(self, subject: str, records: Sequence[_Numbered]) -> None:
        """Add records to the sums on a subject, those that they do not have yet."""
        while True:
            known = await self._read_sums(subject)
            sums = dict(known.sums)
            fresh = [record for seq, record in records if seq > known.through]
            if not fresh:
                return
            for record in fresh:
                kind = (record.key, record.price_entry.currency)
                sums[kind] = sums.get(kind, UsageSums()) + UsageSums.of(record)
            wanted = _DaySums(records[-1][0], known.revision, sums)
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
                rows += [UsageRow(day, model, *kind, sums) for kind, sums in stored.sums.items()]
        return rows


def list_days(start: str, end: str) -> list[str]:
    """Return the days of UTC from `start` to `end`, both included and written as `2026-11-28`.

    Raises ValueError for another form, for an end before the start, and for more than `MAX_DAYS`.
    """
    first, last = date.fromisoformat(start), date.fromisoformat(end)
    count = (last - first).days + 1
    if not 1 <= count <= MAX_DAYS:
        raise ValueError(f"from {start} to {end} are {count} days, not 1 to {MAX_DAYS}")
    return [(first + timedelta(number)).isoformat() for number in range(count)]


def recent_days(now: float) -> tuple[str, str]:
    """Return the first and the last of the 30 days of UTC that end with today."""
    start = quota_windows.utc_day(now - 29 * topology.DAY_SECONDS)
    return start, quota_windows.utc_day(now)


def add_up(rows: Iterable[UsageRow], by: str) -> list[dict[str, Any]]:
    """Return the sums of `rows` by `day`, `model` or `key`, and by currency, in order.

    Each result has the name by which it was added, the currency, the fields of `UsageSums`, and the
    charge as `amount`, in the currency itself and exact: text, since it is above what a JSON number
    holds in some languages.
    """
    sums = defaultdict[tuple[str, str], UsageSums](UsageSums)
    for row in rows:
        sums[getattr(row, by), row.currency] += row.sums
    return [
        {by: name, "currency": currency, **vars(found), "amount": format_amount(found.charge)}
        for (name, currency), found in sorted(sums.items(), key=lambda item: item[0])
    ]
