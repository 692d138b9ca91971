"""Machine types that have failed lately and are left alone for a time. Pure."""

from dataclasses import dataclass, field

from fleet.planner.planner_options import PlannerOptions


@dataclass
class _Pause:
    """The failures of a type since a machine of it has last joined."""

    until: float = 0.0
    last_failed_at: float = 0.0
    machines: set[str] = field(default_factory=set)


class TypePauses:
    """Pauses a type after each machine that was not to be had or has not joined.

    Each failure in a row doubles the pause, so that a type that never works is tried ever more
    seldom.
    """

    def __init__(self, options: PlannerOptions) -> None:
        self._options = options
        self._pauses: dict[str, _Pause] = {}

    def note_failure(self, type_name: str, machine: str, now: float) -> None:
        """Pause a type because of a machine; a machine that is told again changes nothing."""
        pause = self._pauses.setdefault(type_name, _Pause())
        if machine in pause.machines:
            return
        if now >= pause.until:  # machines that fail beside each other are one failure
            doubled = self._options.retry_seconds * 2 ** len(pause.machines)
            pause.until = now + min(doubled, self._options.max_retry_seconds)
            pause.machines.add(machine)
        pause.last_failed_at = now

    def note_success(self, type_name: str, created_at: float) -> None:
        """Forget the failures before a machine that was asked for since and has joined."""
        pause = self._pauses.get(type_name)
        if pause and created_at >= pause.last_failed_at:
            del self._pauses[type_name]

    def is_paused(self, type_name: str, now: float) -> bool:
        """Return True if the type is left alone at a time."""
        pause = self._pauses.get(type_name)
        return pause is not None and now < pause.until
