"""The installed command, as a shell meets it."""

import subprocess
import sys

BASE_INSTALL = """
import sys
sys.modules.update({"torch": None, "transformers": None, "matplotlib": None})  # not installed
import gateway.service, dispatcher.service, millstream.cli, millstream.lag
import millstream.up.supervisor, registry.commands
"""


def test_the_base_install_runs_without_torch() -> None:
    """A gateway's machine has no GPU, and no use for gigabytes of libraries."""
    subprocess.run([sys.executable, "-c", BASE_INSTALL], check=True)


def test_the_module_is_the_command() -> None:
    """`python -m millstream` works where scripts are not on the PATH."""
    words = [sys.executable, "-m", "millstream", "--version"]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("millstream ")


def test_a_slip_is_answered_on_stderr_with_status_2() -> None:
    """Scripts tell a slip from a failure by the status."""
    words = [sys.executable, "-m", "millstream", "lag", "--jsn"]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "millstream: unknown option --jsn; did you mean --json?\n"
