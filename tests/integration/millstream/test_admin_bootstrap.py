"""`millstream admin bootstrap`: the first administrator's key, made where the broker is trusted."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from millstream.admin.admin_client import AdminRefused, HttpAdminClient
from millstream.keys.commands import bootstrap
from millstream.keys.settings import BootstrapSettings
from tests.support.admins import ADMIN_KEY, running_admin
from tests.support.keys import operator, pepper_file
from tests.support.services import command_settings

STOP = asyncio.Event()


@pytest.fixture
async def client(nats_url: str, tmp_path: Path) -> AsyncIterator[HttpAdminClient]:
    """An empty cell has no tenant; the key works all the same."""
    with capture_logs():
        async with running_admin(nats_url, key_pepper_file=pepper_file(tmp_path)) as found:
            yield found


async def made(
    capsys: pytest.CaptureFixture[str], told: dict[str, Any], **flags: Any
) -> dict[str, Any]:
    capsys.readouterr()
    await bootstrap(BootstrapSettings.model_validate({**told, **flags, "json": True}), STOP)
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("door", ["nats", "admin"])
async def test_the_first_key_opens_everything_and_is_shown_once(
    client: HttpAdminClient,
    nats_url: str,
    tmp_path: Path,
    door: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Over NATS without a key, or with the service's own, as in the data directory of `up`."""
    (tmp_path / "key").write_text(ADMIN_KEY)
    by_http = {"admin": client.url, "admin_key_file": tmp_path / "key"}
    first = await made(capsys, command_settings(nats_url) if door == "nats" else by_http)
    assert (first["tenant"], first["scopes"]) == ("operators", ["admin"])
    admin = HttpAdminClient(client.url, first["key"])
    (listed,) = (await admin.call("keys.list"))["data"]
    assert (listed["id"], "key" in listed) == (first["id"], False)
    assert (await admin.call("keys.create", tenant="operators"))["id"]


async def test_a_second_one_is_made_by_force_alone(
    client: HttpAdminClient, nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one stays; its id is told, so that one that was lost can be revoked."""
    told = command_settings(nats_url)
    first = await made(capsys, told)
    with pytest.raises(AdminRefused, match=f"{first['id']}.*--force") as refused:
        await made(capsys, told)
    assert refused.value.code == "admin_key_exists"
    second = await made(capsys, told, force=True)
    for each in (first, second):
        assert (await HttpAdminClient(client.url, each["key"]).call("models.list"))["data"] == []


async def test_a_key_that_works_no_more_stands_in_nobodys_way(
    client: HttpAdminClient, nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Revoked, expired or sealed under a pepper that was lost; nor does one of another scope."""
    first = await made(capsys, command_settings(nats_url))
    await client.call("keys.revoke", id=first["id"])
    await client.call("keys.create", tenant="operators", scopes=["operator"])
    async with operator(nats_url) as op:
        await op.create(scopes=("admin",), expires_at=1.0)
        _, record = await op.create(scopes=("infer",))
        lost = record.model_copy(update={"scopes": ("admin",), "pepper": "00000000"})
        await op.keys.create(lost)
    second = await made(capsys, command_settings(nats_url))
    assert second["id"] != first["id"]


async def test_people_are_shown_the_key_and_nothing_else_has_it(
    client: HttpAdminClient, nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a line of its own, to be copied."""
    await bootstrap(BootstrapSettings.model_validate(command_settings(nats_url)), STOP)
    key, sentence, *_ = capsys.readouterr().out.splitlines()
    assert (await HttpAdminClient(client.url, key).call("models.list"))["data"] == []
    assert "it is not shown again" in sentence
    assert key not in sentence
