"""Load times are of machines' own lives, and of nothing that was not seen whole."""

from dataclasses import replace

from fleet.load_times import LoadTimes
from streams.messages import Heartbeat
from streams.records.fleet.machine_list import Machine, MachineState

SINCE = 100.0
MACHINE = Machine("small", "mock", MachineState.RUNNING, 101.0, 110.0)


def beat(worker: str) -> Heartbeat:
    return Heartbeat(worker, "mock", "1", 1, 1, 0, 0, 1, 1, 0, 0.0, type="small")


def test_the_time_runs_from_the_workers_start_to_its_first_beat() -> None:
    """The last machine counts half; one machine counts once."""
    loads = LoadTimes({}, SINCE)
    loads.note_heartbeat(beat("a"), 112.0)
    loads.note_heartbeat(beat("a"), 113.0)
    assert loads.measure({"a": MACHINE}) == {"a": 2.0}
    assert loads.measure({"a": MACHINE}) == {}
    loads.note_heartbeat(beat("b"), 114.0)
    assert loads.measure({"a": MACHINE, "b": MACHINE}) == {"b": 4.0}
    assert loads.by_model == {"mock": {"small": 3.0}}


def test_what_was_not_seen_whole_is_not_measured() -> None:
    """A new leader has missed first beats; a worker that was started again has another start."""
    machines = {
        "early": replace(MACHINE, changed_at=99.0),
        "crashed": replace(MACHINE, crashes=1),
        "draining": replace(MACHINE, state=MachineState.DRAINING),
    }
    loads = LoadTimes({"mock": {"small": 7.0}}, SINCE)
    for name in machines:
        loads.note_heartbeat(beat(name), 120.0)
    assert loads.measure(machines) == {}
    assert loads.by_model == {"mock": {"small": 7.0}}


def test_machines_that_left_are_forgotten() -> None:
    """However many come and go."""
    loads = LoadTimes({}, SINCE)
    loads.note_heartbeat(beat("a"), 112.0)
    loads.measure({})
    assert not loads.has_joined("a")
