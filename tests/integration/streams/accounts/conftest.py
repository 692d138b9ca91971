"""A cell of one server with accounts, and its streams, for all tests of a file."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.accounts_cell import AccountsCell


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[AccountsCell]:
    """One server, without streams."""
    made = AccountsCell(tmp_path, count=1)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
async def declared(cell: AccountsCell) -> AccountsCell:
    """The same with all streams."""
    await cell.declare()
    return cell
