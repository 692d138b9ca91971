"""Runs `millstream worker` with `SteppedEngine` as mock engine; settings come by environment."""

import sys

from gpu_worker.engines import factory
from millstream import cli


def main() -> int:
    """Run the worker and return its exit status."""
    factory.ENGINES["mock"] = ("bench.live.stepped_engine", "SteppedEngine.load")
    return cli.main(["worker"])


if __name__ == "__main__":
    sys.exit(main())
