"""`millstream worker`, whose mock engine is `SteppedEngine`; settings come by environment."""

import sys

from gpu_worker.engines import factory
from millstream import cli


def main() -> int:
    factory.ENGINES["mock"] = ("bench.live.stepped_engine", "SteppedEngine.load")
    return cli.main(["worker"])


if __name__ == "__main__":
    sys.exit(main())
