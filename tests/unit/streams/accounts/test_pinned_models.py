"""A worker knows from its own credentials which models it has rights for."""

from pathlib import Path

import pytest

from streams.accounts.access import UserClass
from streams.accounts.cell_directory import CellDirectory
from streams.accounts.credentials_file import InvalidCredentials
from streams.accounts.pinned_models import PinnedModels, read_pinned_models
from streams.accounts.rights import Pins


@pytest.fixture
def cell(tmp_path: Path) -> CellDirectory:
    return CellDirectory.create(tmp_path / "cell", shards=1)


def test_a_user_is_for_the_models_and_versions_that_it_is_pinned_to(cell: CellDirectory) -> None:
    """With any version, or one; names are told apart as the broker does."""
    pins = Pins("w1", (("gemma.3", "*"), ("b", "2")))
    found = read_pinned_models(cell.add_user("w1", UserClass.WORKER, pins))
    assert found.has("gemma.3", "any")
    assert (found.has("b", "2"), found.has("b", "1")) == (True, False)
    assert not found.has("gemma_3", "any")
    assert "millstream broker user" in found.explain("w1", "c@1")


def test_a_user_that_is_written_anew_has_the_new_models(cell: CellDirectory) -> None:
    """The worker reads its file again."""
    file = cell.add_user("w1", UserClass.WORKER, Pins("w1", (("a", "*"),)))
    assert not read_pinned_models(file).has("b", "1")
    cell.add_user("w1", UserClass.WORKER, Pins("w1", (("a", "*"), ("b", "*"))))
    assert read_pinned_models(file).has("b", "1")


def test_a_user_that_is_pinned_to_none_is_for_all(cell: CellDirectory) -> None:
    """As one is without accounts."""
    assert read_pinned_models(cell.add_user("w1", UserClass.WORKER)).has("a", "1")
    assert read_pinned_models(None) == PinnedModels()
    assert PinnedModels().has("a", "1")


def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    """It may be half written."""
    file = tmp_path / "w1.creds"
    file.write_text("garbage")
    with pytest.raises(InvalidCredentials, match=r"w1\.creds"):
        read_pinned_models(file)
