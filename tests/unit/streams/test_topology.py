"""Names of consumers: within the broker's limit, and each pool's own."""

import pytest

from streams import subjects, topology
from streams.subjects import PoolKey, Priority

SHORT, LONG = "Qwen/Qwen2.5-0.5B", "A" * 47 + "/" + "A" * 48
MOST = 255  # JetStream's, since a consumer's name is also a folder's
WORKER = "w" * 63


def consumer_names(model: str, version: str) -> list[str]:
    consumers = [
        topology.index_consumer(model, "0a1b2c3d"),
        *(topology.work_consumer(PoolKey(model, version, each), 5) for each in Priority),
        topology.worker_consumer(model, version, WORKER, 5),
    ]
    return [each.durable_name or "" for each in consumers]


@pytest.mark.parametrize("model", [SHORT, LONG, "m" * 128])
@pytest.mark.parametrize("version", ["1", "V" * 128])
def test_every_name_of_a_consumer_fits(model: str, version: str) -> None:
    """The broker refuses a longer one, so the model would have no worker."""
    names = consumer_names(model, version)
    assert max(map(len, names)) <= MOST
    assert len({*names}) == len(names)


def test_a_short_name_is_in_the_consumers_as_it_was() -> None:
    """Services of the release before use the same consumers during an upgrade."""
    index, work, *_, own = consumer_names("Qwen/Qwen2.5", "1.0")
    assert index == "dispatcher_e_z_51wen_2f_51wen2_2e5_0a1b2c3d"
    assert work == "pool_e_z_51wen_2f_51wen2_2e5_1_2e0_interactive"
    assert own == f"worker_e_z_51wen_2f_51wen2_2e5_1_2e0_{WORKER}"


def test_long_names_share_no_consumer() -> None:
    """Models and versions that differ in one character alone are different pools."""
    pairs = [(LONG, "1"), (LONG + "b", "1"), (LONG, "1b"), (LONG, "V" * 128), ("m", LONG)]
    names = [name for pair in pairs for name in consumer_names(*pair)[1:]]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("model", [SHORT, LONG])
def test_a_leader_knows_the_index_of_its_predecessor(model: str) -> None:
    """It removes that one and no other model's."""
    old, new = (topology.index_consumer(model, leader).durable_name or "" for leader in ("a", "b"))
    other = topology.index_consumer(model + "b", "a").durable_name or ""
    assert old != new
    assert topology.is_index_of(old, new)
    assert not topology.is_index_of(other, new)


@pytest.mark.parametrize("placement", [subjects.ANY, WORKER])
@pytest.mark.parametrize("model", [SHORT, LONG])
def test_the_consumer_of_a_subject_is_the_one_that_pulls_it(model: str, placement: str) -> None:
    """The dispatcher looks for work that lies there by the name that it makes of the subject."""
    pool = PoolKey(model, "V" * 128, Priority.BATCH)
    expected = (
        topology.work_consumer(pool, 5)
        if placement == subjects.ANY
        else topology.worker_consumer(*pool[:2], placement, 5)
    )
    found = topology.consumer_name_for(subjects.work(pool, placement))
    assert found == expected.durable_name
