"""The engine's tests with the lowest transformers that `pyproject.toml` allows, and the newest.

Each is installed, with what it depends on, into a directory of its own that goes before `.venv` on
the path; torch and the rest are those of `.venv`. Arguments go to pytest.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PRINT_VERSION = "import transformers; print(transformers.__version__)"


def main() -> int:
    """Zero if all tests pass with both."""
    wanted = supported()
    lowest = next(bound.version for bound in wanted.specifier if bound.operator == ">=")
    runs = {"lowest": f"transformers=={lowest}.*", "newest": str(wanted)}
    outcomes = [run(label, requirement) for label, requirement in runs.items()]
    print("\n".join(line for line, _ in outcomes))
    return int(any(failed for _, failed in outcomes))


def supported() -> Requirement:
    """The versions that the worker's extra asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = map(Requirement, project["optional-dependencies"]["worker"])
    return next(wanted for wanted in extra if wanted.name == "transformers")


def run(label: str, requirement: str) -> tuple[str, int]:
    """Install and test; what to print of it, and pytest's exit status."""
    directory = ROOT / "build" / f"transformers-{label}"
    install = ["pip", "install", "--quiet", "--upgrade", "--target", str(directory)]
    _python([*install, requirement], ROOT).check_returncode()
    version = subprocess.check_output(
        [sys.executable, "-c", PRINT_VERSION], env=_env(directory), text=True
    )
    status = _python(["pytest", "tests/engine", *sys.argv[1:]], directory).returncode
    outcome = f"failed ({status})" if status else "passed"
    return f"{label}: transformers {version.strip()}: {outcome}", status


def _python(module: list[str], first: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", *module], cwd=ROOT, env=_env(first), check=False)


def _env(first: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{first}{os.pathsep}{ROOT}"}


if __name__ == "__main__":
    sys.exit(main())
