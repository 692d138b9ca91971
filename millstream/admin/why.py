"""`millstream why`: explains why a request waits or how it ended, or how a tenant fares."""

import asyncio
import json
from contextlib import suppress
from typing import Any

from millstream.admin.console_output import ANSWER_SECONDS, NOT_FOUND, print_sentences
from millstream.admin.explanations import explain_request, explain_tenant
from millstream.admin.settings import WhySettings
from registry.store import Registry
from registry.tenants import Tenants
from streams import subjects, topology
from streams.broker.broker_client import Broker, connect
from streams.records import token_log
from streams.records.ledger_checks import ForgedRecord, unpack_stored_record

_PRESENCE = ("submissions", "queued", "in_flight")  # a tenant is at a model with any of them
_PAGE_RECORDS = 1000  # ledger records per read
Facts = dict[str, Any]


async def run(settings: WhySettings, stop: asyncio.Event) -> int:
    """Print why a request waits or how it ended, or how a tenant's requests stand at each model.

    1 if the request or tenant is unknown, or no dispatcher answers for the tenant.
    """
    async with connect(settings.nats, "why", settings.nats_files) as broker:
        registry = await Registry.open(broker)
        try:
            models = [settings.model] if settings.model else list(registry.models)
        finally:
            await registry.close()
        facts = await collect_facts(broker, models, settings)
    explain = explain_tenant if settings.tenant else explain_request
    if settings.as_json:
        print(json.dumps(facts, indent=2))
    else:
        print_sentences(explain(facts))
    return NOT_FOUND if facts.get("state") == "unknown" or facts.get("models") == [] else 0


async def collect_facts(broker: Broker, models: list[str], settings: WhySettings) -> Facts:
    """Return JSON data on the request or tenant that the settings name, asked of `models`.

    Those of a tenant hold under `models` a report from each model's dispatcher: of the models at
    which it has requests, or of all if it has none. `state` is `unknown` for no tenant.
    """
    if settings.tenant is None:
        assert settings.request_id
        return await _request_facts(broker, models, settings.request_id, settings.shards)
    reports = await _ask_dispatchers(broker, models, {"tenant": settings.tenant})
    busy = [each for each in reports if any(each[name] for name in _PRESENCE)]
    if not busy and not await _is_tenant(broker, settings.tenant):
        return {"tenant": settings.tenant, "state": "unknown", "models": []}
    return {"tenant": settings.tenant, "models": busy or reports}


async def _is_tenant(broker: Broker, name: str) -> bool:
    tenants = await Tenants.open(broker)
    try:
        return tenants.get(name) is not None
    finally:
        await tenants.close()


async def _request_facts(broker: Broker, models: list[str], request_id: str, shards: int) -> Facts:
    """Facts from the dispatcher that has the request, else its token log, else the ledger."""
    known = await _ask_dispatchers(broker, models, {"request_id": request_id})
    logged = await _read_log_facts(broker, request_id, shards)
    if logged.get("state") == "finished":
        return logged
    if known:
        return {**logged, **known[0]}
    return logged or await _read_ledger_facts(broker, request_id) or _unknown_facts(request_id)


async def _ask_dispatchers(broker: Broker, models: list[str], query: Facts) -> list[Facts]:
    """The answers, other than empty ones, of the leading dispatchers of these models."""
    question = json.dumps(query).encode()
    requests = (broker.request(subjects.report(m), question, ANSWER_SECONDS) for m in models)
    answers = [json.loads(answer) for answer in await asyncio.gather(*requests) if answer]
    return [answer for answer in answers if answer]


async def _read_log_facts(broker: Broker, request_id: str, shards: int) -> Facts:
    """Facts from the request's token log: attempts, tokens, its end; empty without a log."""
    stream = topology.token_stream_of(request_id, shards)
    subject = await broker.find_subject(stream, subjects.log_of_any_tenant(request_id, shards))
    if subject is None:
        return {}
    contents = token_log.decode_contents(await broker.read_subject(stream, subject))
    starts = [record for record in contents.records if record["type"] == "started"]
    facts: Facts = {
        "request_id": request_id,
        "state": "logged",
        "tenant": subjects.parse_log(subject).tenant,
        "attempts": len(starts),
        "tokens": len(contents.tokens),
    }
    if starts:
        facts |= {name: starts[-1][name] for name in ("model", "version", "worker")}
    return facts | _terminal_facts(contents.terminal)


def _terminal_facts(terminal: Facts | None) -> Facts:
    if terminal is None:
        return {}
    return {
        "state": "finished",
        "outcome": terminal.get("finish_reason") or terminal["code"],
        "message": terminal.get("message", ""),
        "usage": terminal["usage"],
        "timing_ms": terminal.get("timing", {}),
    }


async def _read_ledger_facts(broker: Broker, request_id: str) -> Facts | None:
    """The ledger's record of a request whose log is gone; scans the ledger from its start."""
    after = 0
    while True:
        query: dict[str, int | str] = {
            "next_by_subj": subjects.ALL_LEDGERS,
            "seq": after + 1,
            "batch": _PAGE_RECORDS,
        }
        page = await broker.read(topology.LEDGER, query)
        if not page:
            return None
        for message in page:
            with suppress(ForgedRecord):
                record = unpack_stored_record(message.subject, message.data)
                if record.request_id == request_id:
                    return {**vars(record), "state": "finished", "message": ""}
        after = page[-1].seq


def _unknown_facts(request_id: str) -> Facts:
    return {"request_id": request_id, "state": "unknown"}
