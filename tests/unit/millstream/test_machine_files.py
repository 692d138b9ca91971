"""A fleet that starts machines all day must not fill the disk with what they leave."""

import os
from pathlib import Path

from millstream.up.machines.machine_files import KEPT_LOGS, MachineFiles


def test_the_last_logs_of_ended_machines_stay_and_no_credentials(tmp_path: Path) -> None:
    files = MachineFiles(tmp_path, tmp_path)
    files.logs.mkdir()
    names = [f"m-{number:02}" for number in range(KEPT_LOGS + 5)]
    for number, name in enumerate(names):
        (tmp_path / f"{name}.creds").write_text("secret")
        (files.logs / f"{name}.log").write_text("")
        os.utime(files.logs / f"{name}.log", (number, number))
    running, *ended = names
    files.remove_ended(ended, [running])
    assert [file.stem for file in tmp_path.glob("*.creds")] == [running]
    left = sorted(file.stem for file in files.logs.iterdir())
    assert left == [running, *ended[-KEPT_LOGS:]]


def test_without_machines_there_is_nothing_to_remove(tmp_path: Path) -> None:
    MachineFiles(tmp_path, tmp_path).remove_ended(["m-1"], [])
    assert list(tmp_path.iterdir()) == []
