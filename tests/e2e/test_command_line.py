"""The installed command, as a shell meets it."""

import subprocess
import sys
from importlib.metadata import packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EVERY_COMMAND = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # as if not installed
from millstream.command_table import COMMANDS
for command in COMMANDS:
    command.load_settings(), command.load_run()
"""


def required(distribution: str) -> set[str]:
    """The names of a distribution and of all that it needs without extras."""
    found, wanted = set[str](), [distribution]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name not in found:
            found.add(name)
            needs = (Requirement(line) for line in requires(name) or ())
            wanted += [n.name for n in needs if not n.marker or n.marker.evaluate({"extra": ""})]
    return found


def test_the_base_install_has_every_command() -> None:
    """A gateway's machine has no GPU, and no use for gigabytes of libraries."""
    base = required("millstream")
    absent = [
        module
        for module, distributions in packages_distributions().items()
        if base.isdisjoint(map(canonicalize_name, distributions))
    ]
    assert {"torch", "transformers", "matplotlib", "openai"} <= set(absent)
    subprocess.run([sys.executable, "-c", EVERY_COMMAND, *absent], check=True)


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
