"""`python -m tests.adversary [--nodes 3] [--class NAME …] [--json] [--results]`: who reaches what.

Each class of adversary attacks a cell of its own. Prints a table, or JSON; the exit status is 1 if
a class reached what is not its own, or if the control reached nothing.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path

import structlog

from tests.adversary import report, results_file
from tests.adversary.promises import Adversary
from tests.adversary.report import Row, Verdict
from tests.adversary.run import judge_each


def main() -> int:
    """0 if nobody but the control reached what is not its own."""
    words = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no server is left behind
    verdicts = asyncio.run(_judge(words))
    if words.json:
        print(report.as_json(verdicts))
    else:
        report.show(verdicts)
    return int(report.has_failed(report.rows_of(verdicts)))


async def _judge(words: argparse.Namespace) -> list[Verdict]:
    verdicts = list[Verdict]()
    with tempfile.TemporaryDirectory(prefix="adversary-") as home:
        with (words.log or Path(home) / "services.log").open("w", buffering=1) as log:
            structlog.configure(logger_factory=structlog.PrintLoggerFactory(log))
            chosen: list[Adversary] = words.adversary or list(Adversary)
            async for verdict in judge_each(Path(home), words.nodes, chosen, _tell):
                verdicts.append(verdict)
                if words.results:
                    results_file.add(verdict)
    return verdicts


def _tell(row: Row) -> None:
    """Show on stderr how far the run is, and what was found."""
    told = [f"{row.adversary}: {row.attack}: {row.tries} tries", *report.holes([row])]
    print(*told, sep="\n", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.adversary", description=__doc__)
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=1, help="nats-servers")
    parser.add_argument(
        "--class",
        action="append",
        type=Adversary,
        dest="adversary",
        metavar="NAME",
        help=", ".join(f"`{each}`" for each in Adversary),
    )
    parser.add_argument("--json", action="store_true", help="print one object of JSON")
    parser.add_argument(
        "--results", action="store_true", help="add to bench/results/adversary-DATE"
    )
    parser.add_argument("--log", type=Path, help="where the services' log goes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
