"""Runs the sweep; writes tables into docs/models.md, and what the registry is to refuse.

`python -m tests.engine.sweep [ARCHITECTURE …]`: with names, only these causal models are tried, and
the table is printed instead. Exits with 1 if an architecture is wrong.
"""

import logging
import sys
import warnings
from collections.abc import Iterator

import structlog
import torch
import transformers

from tests.engine.sweep import causal, report, unary
from tests.engine.sweep.causal import Result


def main(names: set[str]) -> int:
    """Return 0 if no architecture is wrong."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    sweeps = {"causal": causal.sweep(names)}
    if not names:
        sweeps |= {"encoders": unary.sweep_encoders(), "rerankers": unary.sweep_rerankers()}
    results = {name: list(shown(sweep)) for name, sweep in sweeps.items()}
    tables = {name: report.to_table(found) for name, found in results.items()}
    if names:
        print(tables["causal"])
    else:
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        report.write(tables | {"versions": f"Last run with {versions}."})
        report.write_refused(result for found in results.values() for result in found)
    return int(any(each.outcome == "wrong" for found in results.values() for each in found))


def shown(results: Iterator[Result]) -> Iterator[Result]:
    """Print each result as it comes."""
    for result in results:
        print(f"{result.outcome:10} {result.architecture} {result.reason[:160]}", flush=True)
        yield result


if __name__ == "__main__":
    sys.exit(main(set(sys.argv[1:])))
