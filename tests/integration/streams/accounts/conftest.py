"""Cells of one server and of three, with accounts, and with streams."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.accounts_cell import AccountsCell
from tests.support.eventually import eventually


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[AccountsCell]:
    """One server, without streams."""
    async with started(tmp_path, 1) as made:
        yield made


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[AccountsCell]:
    """A cluster of three, without streams."""
    async with started(tmp_path, 3) as made:
        yield made


@pytest.fixture(params=[1, 3], ids=["one", "three"])
async def everywhere(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[AccountsCell]:
    """One server and three, with all streams."""
    async with started(tmp_path, request.param) as made:
        await made.declare()
        yield made


@asynccontextmanager
async def started(home: Path, count: int) -> AsyncIterator[AccountsCell]:
    made = AccountsCell(home, count)
    try:
        made.start()
        await eventually(lambda: made.has_servers(count))
        yield made
    finally:
        made.close()


@pytest.fixture
async def declared(cell: AccountsCell) -> AccountsCell:
    """The same with all streams."""
    await cell.declare()
    return cell
