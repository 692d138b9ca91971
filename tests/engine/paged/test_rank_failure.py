"""Ranks of a tensor parallel engine live and die together."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from gpu_worker.engines.engine import DeviceLost
from gpu_worker.engines.paged.engine import TransformersEngine
from tests.engine.tensor_parallel import followers, load_engine, save_model
from tests.engine.tiny_models import greedy_sequence, prompt

pytestmark = pytest.mark.timeout(400)  # each rank is a process that imports all of transformers

SCRIPT = """
import signal, sys
from pathlib import Path
from tests.engine.tensor_parallel import load_engine
engine = load_engine(Path(sys.argv[1]))
print("ready", flush=True)
signal.pause()
"""


def drive_until_lost(engine: TransformersEngine) -> None:
    """As a driver does, which looks at an idle engine from time to time."""
    while True:
        if not engine.idle:
            engine.step()


@pytest.mark.parametrize("busy", [True, False])
def test_an_engine_that_lost_a_rank_says_so(busy: bool, tmp_path: Path) -> None:
    """Neither does it hang in a collective, nor wait for the next request to find out."""
    with closing(load_engine(save_model("llama", tmp_path))) as made:
        if busy:
            made.add(greedy_sequence("r", prompt(1, 20), 100))
            made.step()
        (follower,) = followers()
        follower.kill()
        with pytest.raises(DeviceLost):
            drive_until_lost(made)
    assert not followers()


def test_ranks_do_not_outlive_the_first(tmp_path: Path) -> None:
    """A killed worker must not leave processes that hold its devices' memory."""
    command = [sys.executable, "-c", SCRIPT, str(save_model("llama", tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout
        assert b"ready\n" in iter(first.stdout.readline, b"")  # behind what it logs
        first.kill()
        assert first.stdout.read() == b"", (
            "ends when nobody holds the pipe open, no follower either"
        )
