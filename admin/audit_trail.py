"""Writes each change of a record into the audit log before it is made, and then how it ended.

Who makes the change is known by the task that makes it: `acting` says so for a block of code.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from operator import attrgetter
from typing import Any

import structlog
from pydantic import BaseModel

from admin.caller import Caller
from admin.fleet.curve_change import CurveChange
from admin.fleet.fleet_override import FleetOverride, FleetPause
from admin.metrics import AUDIT_USED
from registry.credentials.key_records import Denial, ManagedKey
from registry.credentials.tenant_accounts import TenantAccount
from registry.kv_view import RecordChange
from registry.models import Adapter, Alias, Model, ServedModels
from registry.price_records import PriceRecord
from registry.tenant_records import ApiKey, Tenant
from streams.broker.broker_client import StoreRefused
from streams.errors import BrokerUnavailable
from streams.records.audit_chain import AuditEvent, AuditRecord, JsonValue, shorten
from streams.records.audit_log import AuditFull, AuditLog, AuditUse

log = structlog.get_logger()

CHECK_SECONDS = 10.0
_REFUSAL_SECONDS = 10.0  # between two records of refusals of one caller and operation
_MAX_REFUSED = 1000  # callers and operations whose refusals are told apart
_SECRET_FIELDS = {"seal", "pepper"}  # of managed keys; tenants' records have no secret in them
# What records are called, and by what they are told apart
_TARGETS: Mapping[type, tuple[str, Callable[[Any], str]]] = {
    Tenant: ("tenant", attrgetter("name")),
    ApiKey: ("key", lambda key: f"{key.tenant}/{key.name}"),
    ManagedKey: ("key", attrgetter("id")),
    Denial: ("denial", attrgetter("id")),
    PriceRecord: ("price", attrgetter("model")),
    Model: ("model", attrgetter("name")),
    Alias: ("alias", attrgetter("name")),
    Adapter: ("adapter", attrgetter("id")),
    ServedModels: ("served", attrgetter("on")),
    CurveChange: ("curve", attrgetter("name")),
    FleetOverride: ("fleet", attrgetter("type")),
    FleetPause: ("fleet", attrgetter("name")),
    TenantAccount: ("account", attrgetter("tenant")),
}
_ITSELF = (Caller("admin service"), "", "")
_acting: ContextVar[tuple[Caller, str, str]] = ContextVar("acting", default=_ITSELF)


@contextmanager
def acting(caller: Caller, operation: str, why: str = "") -> Iterator[None]:
    """Have the changes of this block, in this task, recorded as the caller's by an operation."""
    token = _acting.set((caller, operation, why))
    try:
        yield
    finally:
        _acting.reset(token)


class AuditTrail:
    """The audit log as the admin service writes it; `process` is the name of this service."""

    def __init__(self, audit_log: AuditLog, process: str) -> None:
        self._log, self._process = audit_log, process
        self._refused_at: dict[tuple[str, str], float] = {}
        self._untold: dict[tuple[str, str], int] = {}
        self._use = AuditUse()

    @asynccontextmanager
    async def record(self, change: RecordChange[Any]) -> AsyncIterator[None]:
        """Record a change before the block makes it, and afterwards whether it did.

        Raises `AuditFull` or `BrokerUnavailable` before the block. If the process dies in the
        block, or the broker does not answer, the record stays without an end.
        """
        caller, operation, why = _acting.get()
        intended = AuditRecord(
            AuditEvent.INTENDED,
            secrets.token_hex(8),
            caller.name,
            operation,
            _describe_target(change.before or change.after),
            caller.address,
            self._process,
            _to_json(change.before),
            _to_json(change.after),
            why,
        )
        await self._log.append(intended)
        self._observe(self._log.use)
        ended = replace(intended, event=AuditEvent.DONE, before=None, after=None, reason="")
        try:
            yield
        except StoreRefused as refusal:
            reason = "another change was faster" if refusal.is_conflict else str(refusal)
            await self._append_end(replace(ended, event=AuditEvent.ABANDONED, reason=reason))
            raise
        await self._append_end(ended)

    async def _append_end(self, record: AuditRecord) -> None:
        """Best effort: what is made is made, and the record of it says that it was intended."""
        try:
            await self._log.append(record)
        except (AuditFull, StoreRefused, BrokerUnavailable) as error:
            log.error(
                "audit_end_not_recorded",
                target=record.target,
                change=record.change,
                outcome=record.event,
                reason=str(error),
            )

    async def record_refusal(self, caller: Caller, operation: str, name: str, code: str) -> None:
        """Best effort: record that a caller may not make a change, once in ten seconds for each.

        The others are counted in the next record. From 70 % on none is written, so that nobody
        fills the log without any right.
        """
        key, now = (caller.name, operation), time.monotonic()
        if self._use.is_filling or now - self._refused_at.get(key, -now) < _REFUSAL_SECONDS:
            self._untold[key] = self._untold.get(key, 0) + 1
            return
        if len(self._refused_at) >= _MAX_REFUSED:
            self._refused_at.clear()
            self._untold.clear()
        self._refused_at[key] = now
        await self._append_end(
            AuditRecord(
                AuditEvent.REFUSED,
                secrets.token_hex(8),
                caller.name,
                operation,
                f"{operation.partition('.')[0]} {name}",
                caller.address,
                self._process,
                reason=code,
                untold=self._untold.pop(key, 0),
            )
        )

    async def run(self) -> None:
        """Watch how full the log is, until cancelled."""
        while True:
            try:
                self._observe(await self._log.read_use())
            except BrokerUnavailable as error:
                log.debug("audit_not_checked", reason=str(error))
            await asyncio.sleep(CHECK_SECONDS)

    def _observe(self, use: AuditUse) -> None:
        before, self._use = self._use, use
        AUDIT_USED.set(use.ratio)
        facts = {"used_ratio": round(use.ratio, 3), "max_bytes": use.max_bytes}
        if use.is_full and not before.is_full:
            log.error("audit_full", **facts)
        elif use.is_filling and not before.is_filling:
            log.warning("audit_filling", **facts)
        elif before.is_full and not use.is_full:
            log.info("audit_has_room", **facts)


def _to_json(record: BaseModel | None) -> JsonValue:
    """Return a record without its secrets, and without what is as it is by default."""
    if record is None:
        return None
    dumped = record.model_dump(mode="json", exclude=_SECRET_FIELDS, exclude_defaults=True)
    shortened: JsonValue = shorten(dumped)
    return shortened


def _describe_target(record: Any) -> str:
    """Return what a record is, and its name; never the hash of a key."""
    kind, name = _TARGETS[type(record)]
    return f"{kind} {name(record)}"
