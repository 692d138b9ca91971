"""A small part of `python -m tests.adversary`: one server, the quick attacks of most classes."""

import asyncio
from pathlib import Path

import pytest

from tests.adversary import report
from tests.adversary.broker_attacks import ATTACKS
from tests.adversary.promises import Adversary
from tests.adversary.report import Row
from tests.adversary.run import judge_each
from tests.adversary.target_subjects import MARK

QUICK = ("hear every subject", "publish on every subject")


@pytest.fixture(autouse=True)
async def _without_debugging() -> None:
    """With asyncio's debug mode the hundred thousands of tries take a quarter of an hour."""
    asyncio.get_running_loop().set_debug(False)


def _ignore(row: Row) -> None:
    """Rows are looked at in the end."""


@pytest.mark.timeout(900)
async def test_nobody_reaches_what_is_not_his(tmp_path: Path) -> None:
    """While others' requests run: nothing read, nothing changed, no request ended otherwise."""
    chosen = {
        Adversary.NOBODY,
        Adversary.TENANT_KEY,
        Adversary.TENANT_USER,
        Adversary.WORKER,
        Adversary.JOBS,
        Adversary.FLEET,
    }
    attacks = {name: ATTACKS[name] for name in QUICK}
    rows = [r async for v in judge_each(tmp_path, 1, chosen, _ignore, attacks) for r in v.rows]
    assert report.holes(rows) == []
    assert {row.adversary for row in rows} == {str(each) for each in chosen}
    assert all(row.tries for row in rows if not row.attack.startswith("end a request"))
    told = report.reached_by_job(rows)[Adversary.WORKER]
    assert told["infer.token"]  # as docs/security.md says
    assert "keys" not in told
    told = report.reached_by_job(rows)[Adversary.JOBS]
    assert told["$KV.batches"]


async def test_a_hole_is_found(tmp_path: Path) -> None:
    """A user with one right, but in a store: its questions' answers are obeyed."""
    (found,) = [each async for each in judge_each(tmp_path, 1, [Adversary.STORE_USER], _ignore)]
    (row,) = found.rows
    assert row.is_hole
    assert any(MARK in each for each in row.changed)
    assert report.has_failed(found.rows) is False
    assert report.has_failed([]) is False
