"""Two real clusters through several faults each; `make chaos` has the rest, and more seeds."""

from pathlib import Path

import pytest

from tests.chaos import history, network_partition
from tests.chaos.checker import check
from tests.chaos.faults import FAULTS
from tests.chaos.run import run_fault

SEED = 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["short-alone", "short-cluster"])
async def test_every_promise_is_kept_through_faults(name: str, tmp_path: Path) -> None:
    """Workers, gateways, leaders and a broker die, freeze and are cut off: nobody is wronged."""
    if FAULTS[name].shape.can_partition and (reason := network_partition.missing_requirement()):
        pytest.skip(reason)
    events = await run_fault(FAULTS[name], SEED, tmp_path)
    (tmp_path / "history.jsonl").write_text(history.dump(events))
    assert check(events) == []
