"""`millstream curves`: what a file has is stored, listed, audited; a bad line stops all of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from millstream.admin.admin_client import AdminRefused, HttpAdminClient, list_all
from millstream.curves import plan
from millstream.curves.commands import (
    fetch_curves,
    import_curves,
    list_curves,
    put_curve,
    show_curve,
)
from millstream.curves.curve_file import CurveUnreadable
from millstream.curves.plan import GoalsOutOfReach, NoCurve
from millstream.curves.plan_settings import PlanSettings
from millstream.curves.settings import (
    ImportCurvesSettings,
    ListCurvesSettings,
    ShowCurveSettings,
)
from registry.models import mock_model
from streams.accounts.access import UserClass
from streams.errors import NotFound
from streams.records.fleet.curve_store import CurveStore
from streams.records.fleet.curves import Curve, CurvePoint, CurveSource
from streams.records.fleet.step_times import StepTimes
from tests.support.accounts_server import connect
from tests.support.admins import running_admin
from tests.support.eventually import eventually
from tests.support.services import command_settings

STOP = asyncio.Event()
VERSION = next(iter(mock_model("org/m").versions))
POINT = CurvePoint(4, 64, 32, 0.1, 0.01, 12.5)
CURVE = Curve(
    "org/m", VERSION, "l4", CurveSource.BENCH, 5.0, StepTimes(step_seconds=0.01), 64, 10_000,
    points=[POINT],
)  # fmt: skip


@pytest.fixture
async def admin(nats_url: str) -> AsyncIterator[HttpAdminClient]:
    """An admin service that knows the model `org/m`, and has declared the bucket of curves."""
    with capture_logs():
        async with running_admin(nats_url) as client:
            record = mock_model("org/m").model_dump(mode="json")
            await client.call("models.put", name="org/m", model=record)
            await eventually(lambda: _has_curves(client))
            yield client


async def _has_curves(client: HttpAdminClient) -> bool:
    try:
        return bool(await client.call("curves.list"))
    except AdminRefused as refusal:
        return refusal.code != "broker_unavailable"


@pytest.fixture
def door(nats_url: str, admin: HttpAdminClient) -> dict[str, Any]:
    """The settings by which a command finds the admin service."""
    return command_settings(nats_url)


def write(file: Path, *curves: dict[str, Any]) -> Path:
    file.write_text("\n".join(json.dumps(each) for each in curves))
    return file


def as_map(curve: Curve) -> dict[str, Any]:
    return json.loads(json.dumps(curve, default=vars))  # type: ignore[no-any-return]


async def listed(door: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    await list_curves(ListCurvesSettings.model_validate({**door, "json": True}), STOP)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


async def test_what_is_listed_can_be_imported_again(
    door: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So curves move from the cell where they were measured to others."""
    file = write(tmp_path / "curves", as_map(CURVE))
    settings = ImportCurvesSettings.model_validate({**door, "file": file})
    await import_curves(settings, STOP)
    assert "l4/org/m@" in capsys.readouterr().out
    (found,) = await listed(door, capsys)
    assert Curve.from_map(found) == CURVE
    await import_curves(settings, STOP)
    assert await listed(door, capsys) == [found]
    shown = ShowCurveSettings.model_validate({**door, "name": CURVE.name})
    await show_curve(shown, STOP)
    assert "12.5" in capsys.readouterr().out
    with pytest.raises(NotFound, match="l4/org/m@"):
        await show_curve(shown.model_copy(update={"name": "l5/m@1"}), STOP)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"kv_tokens": 0}, "line 2: .*kv_tokens is 0"),
        ({"times": 3}, "line 2: times"),
        ({"source": "guess"}, "line 2: source"),
        ({"model": None}, "line 2: model"),
    ],
)
async def test_a_line_that_is_no_curve_stores_none(
    door: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wrong: dict[str, Any],
    told: str,
) -> None:
    """Half of a file would make plans that nobody can explain."""
    file = write(tmp_path / "curves", as_map(CURVE), {**as_map(CURVE), **wrong})
    with pytest.raises(CurveUnreadable, match=told):
        await import_curves(ImportCurvesSettings.model_validate({**door, "file": file}), STOP)
    assert await listed(door, capsys) == []


async def test_only_curves_of_models_that_there_are_are_stored_and_each_is_audited(
    admin: HttpAdminClient,
) -> None:
    """What workers have told is theirs to write."""
    for curve, code in (
        (replace(CURVE, model="none"), "model_not_found"),
        (replace(CURVE, version="none"), "not_found"),
        (replace(CURVE, source=CurveSource.LIVE), "invalid_request"),
    ):
        with pytest.raises(AdminRefused) as refused:
            await put_curve(admin, curve)
        assert refused.value.code == code
    await put_curve(admin, CURVE)
    records = await list_all(admin, "audit.list", by="seq", what="curves")
    assert {each["target"] for each in records} == {f"curve {CURVE.name}"}


def plan_settings(door: dict[str, Any], **told: Any) -> PlanSettings:
    given = {"rate": "600/min", "prompt": 64, "output": 32, "model": "org/m", "json": True}
    return PlanSettings.model_validate({**door, **given, **told})


async def test_a_plan_is_one_object_with_the_formula_and_its_neighbours(
    door: dict[str, Any], admin: HttpAdminClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no fleet nobody has said what a machine costs."""
    with pytest.raises(NoCurve, match=f"no curve of org/m@{VERSION}.*bench --curve"):
        await plan.run(plan_settings(door), STOP)
    await put_curve(admin, CURVE)
    slow = replace(CURVE, type="slow", times=CURVE.times.scaled(200))
    await put_curve(admin, slow)
    assert await plan.run(plan_settings(door), STOP) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["type"], found["workers"], found["one_fewer"]) == ("l4", 1, None)
    assert found["formula"].startswith("10/s x ")
    assert found["cost_per_million_tokens"] is None
    assert found["one_more"]["workers"] == 2
    (other,) = found["alternatives"]
    assert (other["type"], other["workers"]) == ("slow", other["one_fewer"]["workers"] + 1)
    await plan.run(plan_settings(door, json=False), STOP)
    assert "Other types" in capsys.readouterr().out


async def test_a_plan_that_cannot_be_says_why(
    door: dict[str, Any], admin: HttpAdminClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """A status of 0 would let a script buy what does not help."""
    await put_curve(admin, CURVE)
    with pytest.raises(GoalsOutOfReach, match="alone it takes"):
        await plan.run(plan_settings(door, goal=("ttft=0.001",)), STOP)
    with pytest.raises(NoCurve, match="on the type 'l5'"):
        await plan.run(plan_settings(door, type="l5"), STOP)


async def test_what_workers_tell_counts_until_it_is_measured_again(
    nats_url: str, admin: HttpAdminClient
) -> None:
    """Of two truths the newer one holds."""
    async with connect(nats_url, UserClass.FLEET) as broker:
        await put_curve(admin, CURVE)
        live = CURVE.corrected(1.5, now=6.0)
        await CurveStore(broker).write_live(live)
        assert await fetch_curves(admin) == [live]
        assert live.times.step_seconds == pytest.approx(0.015)
        again = replace(CURVE, measured_at=7.0)
        await put_curve(admin, again)
        assert await fetch_curves(admin) == [again]
