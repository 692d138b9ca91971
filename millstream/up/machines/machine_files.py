"""Files of machines' workers: credentials go with a machine, and its log after some more."""

from collections.abc import Iterable
from pathlib import Path

KEPT_LOGS = 10  # of machines that have ended


class MachineFiles:
    """Logs of machines in a directory of their own, and their credentials among those of `up`."""

    def __init__(self, logs: Path, users: Path) -> None:
        self.logs, self._users = logs / "machines", users

    def remove_ended(self, ended: Iterable[str], existing: Iterable[str]) -> None:
        """Remove the credentials of machines that have ended, and all but the newest of their logs.

        `existing` are the machines whose logs stay in any case.
        """
        for name in ended:
            (self._users / f"{name}.creds").unlink(missing_ok=True)
        kept = {f"{name}.log" for name in existing}
        old = [file for file in self.logs.glob("*.log") if file.name not in kept]
        old.sort(key=lambda file: file.stat().st_mtime, reverse=True)
        for file in old[KEPT_LOGS:]:
            file.unlink()
