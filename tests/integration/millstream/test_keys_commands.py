"""`millstream keys`: a key that is handed out, replaced and withdrawn while a gateway runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from millstream.admin.admin_client import AdminRefused
from millstream.keys.commands import change, create, list_keys, revoke, rotate
from millstream.keys.settings import (
    ChangeKeySettings,
    CreateKeySettings,
    ListKeysSettings,
    RevokeKeySettings,
    RotateKeySettings,
)
from tests.support.admins import ADMIN_KEY, running_admin
from tests.support.eventually import eventually
from tests.support.gateways import RunningGateway, gateways, register, tenants
from tests.support.keys import pepper_file

STOP = asyncio.Event()


@pytest.fixture
async def door(nats_url: str, tmp_path: Path) -> AsyncIterator[Any]:
    """The settings by which a command finds the admin service."""
    (tmp_path / "admin-key").write_text(ADMIN_KEY)
    pepper = pepper_file(tmp_path)
    async with running_admin(nats_url, tenants=tenants(), key_pepper_file=pepper) as client:
        yield {"admin": client.url, "admin_key_file": tmp_path / "admin-key"}


async def made(door: Any, capsys: pytest.CaptureFixture[str], **settings: Any) -> dict[str, Any]:
    told = {**door, "tenant": "acme", "json": True, **settings}
    await create(CreateKeySettings.model_validate(told), STOP)
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


async def status(gateway: RunningGateway, key: str) -> int:
    return (await gateway.request("GET", "/v1/models", key=key)).status


async def has_status(gateway: RunningGateway, key: str, wanted: int) -> bool:
    return await status(gateway, key) == wanted


async def test_a_key_is_made_rotated_and_revoked(
    nats_url: str, door: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its text is told once, and is in no log."""
    settings: Any = {"key_pepper_file": tmp_path / "key-pepper"}
    with capture_logs() as events:
        async with gateways(nats_url, **settings) as (gateway,):
            first = await made(door, capsys, name="ci", expires="30d", scope=["models:read"])
            assert first.keys() >= {"id", "key", "tenant", "scopes", "expires_at"}
            await eventually(lambda: has_status(gateway, first["key"], 200))
            told = {**door, "id": first["id"], "overlap": "1h", "json": True}
            await rotate(RotateKeySettings.model_validate(told), STOP)
            second = json.loads(capsys.readouterr().out)
            assert (second["rotated_from"], second["name"]) == (first["id"], "ci")
            await eventually(lambda: has_status(gateway, second["key"], 200))
            assert await status(gateway, first["key"]) == 200
            told = {**door, "id": first["id"]}
            await revoke(RevokeKeySettings.model_validate(told), STOP)
            assert "revoked" in capsys.readouterr().out
            await eventually(lambda: has_status(gateway, first["key"], 401))
            assert await status(gateway, second["key"]) == 200
            await list_keys(ListKeysSettings.model_validate(door), STOP)
            table = capsys.readouterr().out
            assert first["id"] in table
            assert "revoked" in table
            await list_keys(ListKeysSettings.model_validate({**door, "json": True}), STOP)
            listed = capsys.readouterr().out
    told_of = listed + repr(events)
    assert not any(each["key"].split("_")[2] in told_of for each in (first, second))
    assert all("seal" not in json.loads(line) for line in listed.splitlines())


async def test_what_cannot_be_done_is_said(door: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With the name that was given."""
    with pytest.raises(AdminRefused, match="no tenant 'nobody'"):
        await made(door, capsys, tenant="nobody")
    with pytest.raises(AdminRefused, match="no key with the id 'none'"):
        await revoke(RevokeKeySettings.model_validate({**door, "id": "none"}), STOP)
    key = await made(door, capsys)
    await revoke(RevokeKeySettings.model_validate({**door, "id": key["id"]}), STOP)
    with pytest.raises(AdminRefused, match="was revoked: create a new one"):
        await rotate(RotateKeySettings.model_validate({**door, "id": key["id"]}), STOP)


async def test_a_key_to_an_unknown_model_is_refused_unless_it_is_forced(
    nats_url: str, door: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip of the finger would be a key that may use nothing; the near name is told."""
    await register(nats_url)
    mistyped = r"'mok' does not exist; did you mean 'mock'\?.*--force"
    with pytest.raises(AdminRefused, match=mistyped):
        await made(door, capsys, model=["vectors", "mok"])
    assert (await made(door, capsys, model=["mok"], force=True))["id"]
    key = await made(door, capsys, model=["mock", "mock@1"])
    told = {**door, "id": key["id"], "model": ["mok"]}
    with pytest.raises(AdminRefused, match=mistyped):
        await change(ChangeKeySettings.model_validate(told), STOP)
    await change(ChangeKeySettings.model_validate({**told, "force": True}), STOP)
    await change(ChangeKeySettings.model_validate({**told, "model": ["vectors"]}), STOP)


async def test_without_a_pepper_no_key_is_made(
    nats_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remedy is in the sentence."""
    (tmp_path / "admin-key").write_text(ADMIN_KEY)
    async with running_admin(nats_url, tenants=tenants()) as client:
        found = {"admin": client.url, "admin_key_file": tmp_path / "admin-key"}
        with pytest.raises(AdminRefused, match="--key-pepper-file"):
            await made(found, capsys)


async def test_denials_and_keys_of_a_removed_tenant(nats_url: str, tmp_path: Path) -> None:
    """A tenant that is added again under an old name does not get its keys."""
    async with running_admin(nats_url, key_pepper_file=pepper_file(tmp_path)) as client:
        await client.call("tenants.add", name="bar")
        await client.call("keys.create", tenant="bar")
        assert (await client.call("tenants.show", name="bar"))["keys"] == 1
        await client.call("tenants.remove", name="bar")
        assert (await client.call("keys.list"))["data"] == []
        denial = await client.call("denials.add", issuer="https://id.example.com", subject="ada")
        (listed,) = (await client.call("denials.list"))["data"]
        assert listed == denial
        await client.call("denials.remove", id=denial["id"])
        assert (await client.call("denials.list"))["data"] == []
        with pytest.raises(AdminRefused, match="not both"):
            await client.call("denials.add", issuer="i", subject="s", token_id="t")


async def test_a_key_is_made_with_limits_of_its_own(
    door: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that its record has, and none that was not given."""
    limits = {
        "requests_per_minute": 30,
        "tokens_per_month": 1_000_000,
        "spend_per_day": 0.5,
        "soft_quotas": ["spend_per_day"],
        "max_connections": 5,
    }
    made_key = await made(door, capsys, name="small", **limits)
    await list_keys(ListKeysSettings.model_validate({**door, "json": True}), STOP)
    (listed,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert listed["id"] == made_key["id"]
    assert {name: listed[name] for name in limits} == limits
    assert (listed["max_concurrent"], listed["frames_per_second"]) == (None, None)


async def changed(
    door: Any, capsys: pytest.CaptureFixture[str], id: str, **limits: Any
) -> dict[str, Any]:
    told = {**door, "id": id, "json": True, **limits}
    await change(ChangeKeySettings.model_validate(told), STOP)
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


async def test_limits_of_a_key_change_while_it_is_used(
    nats_url: str, door: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An open socket meets new ones at its next frame, and a new end when it is there."""
    await register(nats_url)
    pepper: Any = {"key_pepper_file": tmp_path / "key-pepper"}
    async with gateways(nats_url, **pepper) as (gateway,):
        key = await made(door, capsys, name="ci", tokens_per_day=1000)
        await eventually(lambda: has_status(gateway, key["key"], 200))
        numbers = count()
        async with gateway.socket(key=key["key"]) as socket:

            async def code_of_one() -> str:
                """The type or code of the answer to one more request."""
                await socket.generate(f"r{next(numbers)}")
                frame = await socket.receive()
                return str(frame.get("code", frame["type"]))

            async def is_answered(wanted: str) -> bool:
                return await code_of_one() == wanted

            assert await code_of_one() == "accepted"
            first = await changed(
                door, capsys, key["id"], model=["other"], force=True, tokens_per_day=5
            )
            assert (first["models"], first["tokens_per_day"], first["name"]) == (["other"], 5, "ci")
            await eventually(lambda: is_answered("model_not_allowed"))
            await changed(door, capsys, key["id"], unlimited=["model"])
            await eventually(lambda: is_answered("larger_than_quota"))
            second = await changed(door, capsys, key["id"], unlimited=["tokens_per_day"])
            assert (second["models"], second["tokens_per_day"]) == ([], None)
            await eventually(lambda: is_answered("accepted"))
            await changed(door, capsys, key["id"], expires="1s")
            closing = socket.connection
            await eventually(lambda: closing.close_code is not None)
            assert (closing.close_code, closing.close_reason) == (1008, "key_expired")
        with pytest.raises(AdminRefused, match="has expired: create a new one"):
            await changed(door, capsys, key["id"], expires="30d")


def test_a_change_says_what_changes() -> None:
    """And each limit once."""
    with pytest.raises(ValidationError, match="nothing is to be changed"):
        ChangeKeySettings(id="k")
    with pytest.raises(ValidationError, match="tokens_per_day is given a value and is to be"):
        ChangeKeySettings(id="k", tokens_per_day=5, unlimited=("tokens_per_day",))
