"""CPU time of processes on this machine, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

from streams.errors import BadRequest

TICKS = os.sysconf("SC_CLK_TCK")


class ProcessNotFound(BadRequest):
    """A word that names no running process of this machine."""


@dataclass(frozen=True)
class MeasuredProcess:
    """A running process under the name that a report shows."""

    name: str
    pid: int

    def cpu_seconds(self) -> float | None:
        """User and system time of all its threads so far, to 10 ms; None once it is gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return None
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICKS


OWN_PROCESS = MeasuredProcess("bench", os.getpid())


def parse_processes(words: tuple[str, ...]) -> list[MeasuredProcess]:
    """`123`, `gateway=123` or several with commas; a process without a name has its program's.

    Raises `ProcessNotFound`.
    """
    return [_parse_process(word) for group in words for word in group.split(",")]


def _parse_process(word: str) -> MeasuredProcess:
    name, _, pid = word.rpartition("=")
    try:
        program = Path(f"/proc/{int(pid)}/comm").read_text().strip()
    except (ValueError, OSError):
        raise ProcessNotFound(f"no process {word!r} on this machine") from None
    return MeasuredProcess(name or f"{program} {pid}", int(pid))


@dataclass(frozen=True)
class CpuMeter:
    """CPU readings of some processes at one moment."""

    before: dict[MeasuredProcess, float | None]

    @classmethod
    def start(cls, processes: list[MeasuredProcess]) -> "CpuMeter":
        return cls({process: process.cpu_seconds() for process in processes})

    def us_per_token(self, tokens: int) -> dict[str, float | None]:
        """CPU µs since the start per token; None without tokens or for a process that is gone."""
        return {
            process.name: _us_per_token(process, begin, tokens)
            for process, begin in self.before.items()
        }


def _us_per_token(process: MeasuredProcess, begin: float | None, tokens: int) -> float | None:
    end = process.cpu_seconds()
    if begin is None or end is None or not tokens:
        return None
    return (end - begin) * 1e6 / tokens
