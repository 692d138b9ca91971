"""Load times of models by machine type, measured by machines' own lives. Pure."""

from collections.abc import Mapping

from streams.messages import Heartbeat
from streams.records.fleet.machine_list import Machine, MachineState

_WEIGHT_OF_LAST = 0.5


class LoadTimes:
    """Seconds from the start of a worker to its first heartbeat, which it sends once it is warm.

    `by_model` has them by model and type, each the mean of the measured ones, of which the last
    counts half. Machines that run before `since` (epoch seconds) are not measured: an earlier
    heartbeat of theirs may have been missed.
    """

    def __init__(self, by_model: Mapping[str, Mapping[str, float]], since: float) -> None:
        self.by_model = {name: dict(each) for name, each in by_model.items()}
        self._since = since
        self._first_beats: dict[str, float] = {}
        self._measured: set[str] = set()

    def note_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Take a heartbeat that was heard at `now` (epoch seconds)."""
        self._first_beats.setdefault(beat.worker, now)

    def has_joined(self, worker: str) -> bool:
        """Return True if a heartbeat of a worker was heard."""
        return worker in self._first_beats

    def measure(self, machines: Mapping[str, Machine]) -> dict[str, float]:
        """Return the load time of each machine that has joined since the last call, by its id."""
        found = {
            name: self._first_beats[name] - machine.changed_at
            for name, machine in machines.items()
            if name in self._first_beats and name not in self._measured and self._is_new(machine)
        }
        for name, seconds in found.items():
            self._add(machines[name], seconds)
        self._measured.update(found)
        self._first_beats = {k: v for k, v in self._first_beats.items() if k in machines}
        self._measured &= machines.keys()
        return found

    def _is_new(self, machine: Machine) -> bool:
        is_first = machine.state is MachineState.RUNNING and not machine.crashes
        return is_first and machine.changed_at >= self._since

    def _add(self, machine: Machine, seconds: float) -> None:
        of_model = self.by_model.setdefault(machine.model, {})
        before = of_model.get(machine.type, seconds)
        seconds = _WEIGHT_OF_LAST * max(0.0, seconds) + (1 - _WEIGHT_OF_LAST) * before
        of_model[machine.type] = round(seconds, 3)
