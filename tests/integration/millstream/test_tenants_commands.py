"""`millstream tenants`: over NATS, over HTTP, and where nobody answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from millstream.admin import admin_client
from millstream.admin.admin_client import AdminRefused, AdminUnreachable
from millstream.tenants.commands import add, change, list_tenants, remove
from millstream.tenants.settings import (
    AddTenantSettings,
    ChangeTenantSettings,
    ListTenantsSettings,
    RemoveTenantSettings,
)
from streams.base_settings import TenantSettings
from tests.support.admins import ADMIN_KEY, running_admin
from tests.support.ports import free_port
from tests.support.services import command_settings

STOP = asyncio.Event()


@pytest.fixture(params=["nats", "http"])
async def door(nats_url: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """The settings by which a command finds the admin service."""
    configured = {"acme": TenantSettings(keys=("sk-acme",))}
    with capture_logs():
        async with running_admin(nats_url, tenants=configured) as client:
            (tmp_path / "key").write_text(f"{ADMIN_KEY}\n")
            by_http = {"admin": client.url, "admin_key_file": tmp_path / "key"}
            yield by_http if request.param == "http" else command_settings(nats_url)


async def listed(door: Any, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    await list_tenants(ListTenantsSettings.model_validate({**door, "json": True}), STOP)
    tenants = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {tenant["name"]: tenant for tenant in tenants}


async def test_a_tenant_comes_changes_and_goes(
    door: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not given stays as it was."""
    told = {**door, "name": "bar", "weight": 2, "max_queued": 7, "json": True}
    await add(AddTenantSettings.model_validate(told), STOP)
    assert json.loads(capsys.readouterr().out)["weight"] == 2
    await change(ChangeTenantSettings.model_validate({**door, "name": "bar", "weight": 3}), STOP)
    assert "bar: changed" in capsys.readouterr().out
    found = await listed(door, capsys)
    assert (found["bar"]["weight"], found["bar"]["max_queued"]) == (3, 7)
    assert found.keys() == {"acme", "bar"}
    await list_tenants(ListTenantsSettings.model_validate(door), STOP)
    table = capsys.readouterr().out
    assert "configuration" in table
    assert "max_queued=7" in table
    await remove(RemoveTenantSettings.model_validate({**door, "name": "bar"}), STOP)
    assert (await listed(door, capsys)).keys() == {"acme"}
    with pytest.raises(AdminRefused, match="configuration file"):
        await remove(RemoveTenantSettings.model_validate({**door, "name": "acme"}), STOP)


@pytest.mark.parametrize("door", ["http"], indirect=True)
async def test_a_wrong_key_is_said(door: Any, tmp_path: Path) -> None:
    """Over HTTP; NATS knows none."""
    (tmp_path / "wrong").write_text("sk-wrong")
    told = {**door, "admin_key_file": tmp_path / "wrong"}
    with pytest.raises(AdminRefused, match="does not open the admin API"):
        await list_tenants(ListTenantsSettings.model_validate(told), STOP)


async def test_an_address_where_nobody_listens_is_named_with_the_remedy() -> None:
    """Whoever mistypes a port reads it there."""
    url = f"http://127.0.0.1:{free_port()}"
    settings = ListTenantsSettings.model_validate({"admin": url, "admin_key": "sk"})
    with pytest.raises(AdminUnreachable, match=rf"{url}.*millstream admin"):
        await list_tenants(settings, STOP)


async def test_a_cell_without_an_admin_service_is_told_as_one(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that writes nothing must not look like one that did."""
    monkeypatch.setattr(admin_client, "FIND_SECONDS", 0.2)
    told = {**command_settings(nats_url), "name": "bar"}
    with pytest.raises(AdminUnreachable, match="start `millstream admin`"):
        await add(AddTenantSettings.model_validate(told), STOP)


async def test_what_answers_there_may_be_another_program(nats_url: str) -> None:
    """NATS's own greeting is no HTTP."""
    settings = ListTenantsSettings.model_validate({"admin": nats_url.replace("nats", "http")})
    with pytest.raises(AdminUnreachable, match="no admin service"):
        await list_tenants(settings, STOP)
