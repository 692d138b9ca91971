"""Wall clocks that can be set while their process runs: `wall_clock.c` stands before libc.

The monotonic clock, which nobody can set, stays. Go asks the kernel itself: brokers are not
deceived. (libfaketime 0.9.10 does all this and more: with it, `time.sleep` fails.)
"""

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = "cc"


def missing_requirement() -> str:
    """Why this cannot be done here; empty if it can."""
    return "" if shutil.which(COMPILER) else f"there is no C compiler ({COMPILER})"


def build_library(home: Path) -> Path:
    """The library that a process is to load before all others."""
    library = home / "wall_clock.so"
    command = [COMPILER, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


class WallClock:
    """One service's, which is right until it is set."""

    def __init__(self, library: Path, told: Path) -> None:
        self._library, self._told = library, told
        told.touch()
        self.set(0)

    def set(self, seconds: int) -> None:
        """So far is it ahead of the machine's from now on."""
        with self._told.open("r+b") as told:  # in place: the process has it mapped
            told.write(struct.pack("=q", seconds))

    @property
    def environment(self) -> dict[str, str]:
        """What a process is started with to have this clock."""
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK": str(self._told)}
