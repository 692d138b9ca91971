"""Measures the CPU time of processes on this machine, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

from streams.errors import BadRequest

TICKS = os.sysconf("SC_CLK_TCK")


class ProcessNotFound(BadRequest):
    """A value of `--pids` names no running process of this machine."""


@dataclass(frozen=True)
class MeasuredProcess:
    """A running process under the name that a report shows."""

    name: str
    pid: int

    def cpu_seconds(self) -> float | None:
        """Return user and system time of all its threads so far, to 10 ms; None if it has ended."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return None
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICKS


OWN_PROCESS = MeasuredProcess("bench", os.getpid())


def parse_processes(words: tuple[str, ...]) -> list[MeasuredProcess]:
    """Parse words like `123`, `gateway=123` or several of these with commas.

    A process without a given name is called by its program and pid. Raises `ProcessNotFound`.
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
    """The CPU time that some processes use, measured from `start`."""

    before: dict[MeasuredProcess, float | None]

    @classmethod
    def start(cls, processes: list[MeasuredProcess]) -> "CpuMeter":
        """Read the CPU time of the processes now, as the start of the measurement."""
        return cls({process: process.cpu_seconds() for process in processes})

    def us_per_token(self, tokens: int) -> dict[str, float | None]:
        """Return by process name the CPU µs per token since the start.

        None if there were no tokens, or for a process that has ended.
        """
        return {
            process.name: _us_per_token(process, start, tokens)
            for process, start in self.before.items()
        }


def _us_per_token(process: MeasuredProcess, start: float | None, tokens: int) -> float | None:
    end = process.cpu_seconds()
    if start is None or end is None or not tokens:
        return None
    return (end - start) * 1e6 / tokens
