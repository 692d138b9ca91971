"""The audit log: each change is in it before it is made, and nobody can take it out again."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest
from nats.js.errors import APIError
from structlog.testing import capture_logs

from millstream.admin.admin_client import AdminRefused, HttpAdminClient, NatsAdminClient
from registry.credentials.key_format import KeyText
from registry.credentials.key_pepper import Pepper
from registry.tenants import hash_key
from streams import subjects, topology
from streams.accounts.access import UserClass
from streams.base_settings import TenantSettings
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.records.audit_chain import AuditEvent, AuditRecord, ChainVerifier
from streams.records.audit_log import AuditFull, AuditLog
from streams.topology import MIB, Scale
from tests.support.accounts_server import connect, process_files, process_settings
from tests.support.admins import ADMIN_KEY, running_admin
from tests.support.eventually import eventually
from tests.support.service_process import ServiceProcess

SITE = Path(__file__).parent / "killed_at_the_write"
CONFIGURED = {"acme": TenantSettings(keys=("sk-acme-0123456789abcdefghij",), weight=2)}


async def records(client: HttpAdminClient, **chosen: Any) -> list[dict[str, Any]]:
    """All records, checked as a chain if none is left out."""
    found: list[dict[str, Any]] = []
    after = 0
    while True:
        answer = await client.call("audit.list", after=after, **chosen)
        found += answer["data"]
        if not answer["has_more"]:
            break
        after = answer["last"]
    if not chosen.keys() - {"limit"}:
        verifier = ChainVerifier()
        for record in found:
            verifier.add(orjson.dumps(record))
    return found


def told(found: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    return [(r["who"], r["operation"], r["target"], r["event"]) for r in found]


async def test_a_change_is_told_with_who_what_before_and_after(nats_url: str) -> None:
    """What was about to be made, and that it was; what changes nothing leaves nothing."""
    async with running_admin(nats_url, tenants=CONFIGURED) as client:
        await client.call("tenants.add", name="bar", weight=3)
        await client.call("tenants.change", name="bar", weight=4, max_queued=9)
        await client.call("tenants.change", name="bar", weight=4)
        with pytest.raises(AdminRefused):
            await client.call("tenants.add", name="bar")
        await client.call("tenants.remove", name="bar")
        found = await records(client)
        own = await records(client, who="admin-key", what="tenant bar")
        assert [r for r in found if r["who"] == "admin-key"] == own
        assert await records(client, since=found[-1]["at"] / 1000 + 60) == []
        assert await records(client, limit=2) == found
    assert {r["who"] for r in found} == {"configuration", "admin-key"}
    assert told(own) == [
        ("admin-key", operation, "tenant bar", event)
        for operation in ("tenants.add", "tenants.change", "tenants.remove")
        for event in ("intended", "done")
    ]
    added, _, changed, _, removed, _ = own
    assert (added["before"], added["after"]["weight"]) == (None, 3)
    assert (changed["before"]["weight"], changed["after"]["weight"]) == (3, 4)
    assert (changed["after"]["max_queued"], removed["after"]) == (9, None)
    assert added["address"] == "127.0.0.1"


async def test_who_lacks_the_right_is_told_without_filling_the_log(
    nats_url: str, tmp_path: Path
) -> None:
    """Once in ten seconds for each key and operation."""
    pepper = tmp_path / "pepper"
    pepper.write_bytes(b"x" * 32)
    async with running_admin(nats_url, tenants=CONFIGURED, key_pepper_file=pepper) as client:
        made = await client.call("keys.create", tenant="acme", scopes=["operator"])
        operator = HttpAdminClient(client.url, made["key"])
        for _ in range(5):
            with pytest.raises(AdminRefused, match="needs the scope 'admin'"):
                await operator.call("tenants.add", name="bar")
        (refused,) = await records(operator, who=made["id"])
    assert (refused["event"], refused["target"]) == ("refused", "tenants bar")
    assert (refused["reason"], refused["address"]) == ("insufficient_scope", "127.0.0.1")


async def test_no_secret_and_no_hash_of_one_is_in_it(nats_url: str, tmp_path: Path) -> None:
    """Neither of keys of the configuration nor of managed ones, nor a seal under the pepper."""
    pepper = tmp_path / "pepper"
    pepper.write_bytes(b"x" * 32)
    settings = {"tenants": CONFIGURED, "key_pepper_file": pepper}
    async with running_admin(nats_url, **settings) as client, connect(nats_url, "test") as broker:
        made = await client.call("keys.create", tenant="acme", name="ci")
        other = await client.call("keys.rotate", id=made["id"])
        await client.call("keys.revoke", id=other["id"])
        stored = await broker.read_subject(topology.AUDIT, subjects.ALL_AUDIT)
        text = repr([(m.subject, m.data, m.headers) for m in stored])
    assert f"key {made['id']}" in text
    configured = "sk-acme-0123456789abcdefghij"
    for key in (configured, made["key"], other["key"], ADMIN_KEY):
        assert key not in text
        assert hash_key(key) not in text
    for key in (made["key"], other["key"]):
        parsed = KeyText.parse(key)
        assert parsed
        assert parsed.secret not in text
        assert Pepper(b"x" * 32).seal(parsed.id, parsed.secret) not in text
    assert "seal" not in text


async def test_admins_in_a_race_write_one_chain(nats_url: str) -> None:
    """Each record follows the last one, whoever wrote that."""
    async with running_admin(nats_url) as one, running_admin(nats_url) as other:
        adding = (
            each.call("tenants.add", name=f"t{number}")
            for number, each in enumerate((one, other) * 10)
        )
        await asyncio.gather(*adding)
        racing = (
            each.call("tenants.change", name="t0", weight=w) for w, each in ((2, one), (3, other))
        )
        await asyncio.gather(*racing)
        found = await records(one)
    assert sum(r["event"] == "done" for r in found) == 22
    befores = [r for r in found if r["operation"] == "tenants.change" and r["event"] == "intended"]
    ended = {r["change"]: r["event"] for r in found if r["event"] != "intended"}
    made = [r for r in befores if ended[r["change"]] == "done"]
    assert [ended[r["change"]] for r in befores if r not in made] in ([], ["abandoned"])
    assert made[0]["after"] == made[1]["before"]


async def test_a_kill_between_record_and_change_is_seen_and_harmless(
    nats_url: str, tmp_path: Path
) -> None:
    """The record stands without an end, nothing is changed, and the next one may try again."""
    path = f"{SITE}:{Path(__file__).parents[3]}"
    creds = process_settings(nats_url, UserClass.ADMIN, "doomed")
    settings = {"nats": nats_url, "id": "doomed", **creds}
    service = ServiceProcess("admin", tmp_path / "log", settings, {"PYTHONPATH": path})
    try:
        async with connect(nats_url, "test") as broker:
            await eventually(lambda: service.has_logged("admin_listening"))
            service.process.send_signal(signal.SIGUSR1)
            payload = json.dumps({"name": "bar", "weight": 5}).encode()

            async def is_dead() -> bool:
                await broker.request(subjects.admin("tenants.add"), payload, 0.2)
                return service.process.poll() is not None

            await eventually(is_dead)
    finally:
        service.kill()
    assert service.process.returncode == -signal.SIGKILL
    async with running_admin(nats_url) as client:
        (left,) = await records(client, what="tenant bar")
        assert (left["event"], left["process"]) == ("intended", "doomed")
        assert left["who"].partition(":")[0] == "nats"
        assert (await client.call("tenants.list"))["data"] == []
        await client.call("tenants.add", name="bar", weight=5)
        assert [r["event"] for r in await records(client)] == ["intended", "intended", "done"]


async def fill(broker: Broker) -> None:
    """Append until the log refuses changes."""
    audit_log = AuditLog(broker)
    filler = AuditRecord(AuditEvent.INTENDED, "c", "test", "fill", "tenant x", reason="x" * 60_000)
    while not (await audit_log.read_use()).is_full:
        await audit_log.append(filler)
    with pytest.raises(AuditFull):
        await audit_log.append(filler)


async def test_a_full_log_refuses_changes_and_the_service_goes_on(nats_url: str) -> None:
    """Nothing is changed without a record; a larger log is the remedy, and loses none."""
    async with running_admin(nats_url, audit_bytes=MIB) as client, connect(nats_url, "t") as broker:
        await client.call("tenants.add", name="bar")
        await fill(broker)
        with (
            capture_logs() as events,
            pytest.raises(AdminRefused, match="--audit-bytes") as refused,
        ):
            await client.call("tenants.change", name="bar", weight=2)
        assert refused.value.code == "audit_full"
        (tenant,) = (await client.call("tenants.list"))["data"]
        assert tenant["weight"] == 1
        before = await records(client)
        assert any(e.get("outcome") == "audit_full" for e in events)
    with capture_logs() as events:
        async with running_admin(nats_url, audit_bytes=MIB, tenants=CONFIGURED) as client:
            assert [t["name"] for t in (await client.call("tenants.list"))["data"]] == ["bar"]
    assert "configuration_not_applied" in {e["event"] for e in events}
    async with running_admin(nats_url, audit_bytes=2 * MIB, tenants=CONFIGURED) as client:
        await client.call("tenants.change", name="bar", weight=2)
        found = await records(client)
    assert found[: len(before)] == before
    assert told(found[-1:]) == [("admin-key", "tenants.change", "tenant bar", "done")]


async def test_nobody_deletes_a_record(nats_url: str) -> None:
    """Not even whoever may ask JetStream anything."""
    async with running_admin(nats_url) as client, connect(nats_url, "test") as broker:
        await client.call("tenants.add", name="bar")
        (first, *_) = await records(client)
        with pytest.raises(APIError):
            await broker.js.delete_msg(topology.AUDIT, first["sequence"])
        with pytest.raises(APIError):
            await broker.js.purge_stream(topology.AUDIT)
        config = (await declaration.stream_info(broker, topology.AUDIT)).config
        with pytest.raises(APIError):
            await broker.js.update_stream(config.evolve(deny_delete=False, deny_purge=False))
        assert len(await records(client)) == 2


async def test_a_record_whose_confirmation_was_lost_is_written_once(nats_url: str) -> None:
    """It is found in the place where it should be."""
    async with connect(nats_url, "test") as broker:
        await declaration.declare_stream(broker, topology.audit_stream(MIB), Scale())
        audit_log, store = AuditLog(broker), broker.store_retrying

        async def storing_twice(*args: Any, **named: Any) -> Any:
            await store(*args, **named)
            return await store(*args, **named)

        broker.store_retrying = storing_twice  # type: ignore[method-assign]
        record = AuditRecord(AuditEvent.DONE, "c", "test", "x", "tenant x")
        for _ in range(3):
            await audit_log.append(record)
        assert len(await broker.read_subject(topology.AUDIT, subjects.ALL_AUDIT)) == 3


async def test_the_user_of_nats_is_told(nats_url: str) -> None:
    """By the servers, with where from: an operator's name is no word of their own."""
    files = process_files(nats_url, UserClass.OPERATOR, "ada")
    async with running_admin(nats_url) as client, connect(nats_url, "ada", files) as broker:
        await NatsAdminClient(broker).call("tenants.add", name="bar")
        found = await records(client, who="nats:operator-ada")
    assert [r["event"] for r in found] == ["intended", "done"]
    assert {r["address"] for r in found} == {"127.0.0.1"}
