"""`python -m bench [WHAT…] [--runs N] [--seconds S]` runs measurements by name.

Without a name it runs those that change with the code and need neither traces nor Dynamo.
"""

import argparse
import signal
from collections.abc import Callable
from functools import partial

from bench import (
    abusive_clients,
    accounts_cost,
    append_cost,
    backlog,
    batches,
    capacity_forecast,
    chunked_prefill,
    engine_comparison,
    failover_vs_dynamo,
    gateway_count,
    gateway_vs_dynamo,
    half_reclaimed,
    key_check_cost,
    killed_batch,
    ledger_sums,
    meter_cost,
    pipeline_cost,
    quota_cost,
    scale_to_zero,
    throughput_share,
)
from bench.autoscaling import autoscaling_cost, plan_time
from bench.live import beside_batch, dispatch_latency, isolation, overload, revocation
from bench.simulation.scenarios.overload import ARENA, CONV, as_it_was, at_random

NEED_TRACES = "mixed", "live-b2", "live-b3", "live-b4", "autoscaling"
NEED_DYNAMO = "front_ends", "failures"
# Up to 10,000 sockets, or minutes of requests, and goals that were reached
SETTLED = (
    *("idle", "unread", "cancels", "ledger", "ledger-undisturbed", "accounts", "append", "jobs"),
    *("capacity", "zero"),
)
BY_NAME_ONLY = NEED_TRACES + NEED_DYNAMO + SETTLED
MEASUREMENTS: dict[str, Callable[[int, float], None]] = {
    "pipeline": pipeline_cost.measure,
    "pipeline-tls": partial(pipeline_cost.measure, tls=True),
    "gateways": gateway_count.measure,
    "half-reclaimed": half_reclaimed.measure,
    "front_ends": gateway_vs_dynamo.measure,
    "failures": failover_vs_dynamo.measure,
    "engine_share": throughput_share.measure,
    "engine": engine_comparison.measure,
    "mixed": chunked_prefill.measure,
    "backlog": backlog.measure,
    "quotas": quota_cost.measure,
    "ledger": ledger_sums.measure,
    "ledger-undisturbed": ledger_sums.measure_undisturbed,
    "accounts": accounts_cost.measure,
    "append": append_cost.measure,
    "jobs": batches.measure,
    "capacity": capacity_forecast.measure,
    "jobs-killed": killed_batch.measure,
    "zero": scale_to_zero.measure_wakes,
    "zero-killed": scale_to_zero.measure_killed,
    "meter": meter_cost.measure,
    "key-checks": key_check_cost.measure,
    "revocation": revocation.measure,
    "idle": abusive_clients.idle,
    "unread": abusive_clients.unread,
    "cancels": abusive_clients.cancels,
    "autoscaling": autoscaling_cost.measure,
    "autoscaling-code": autoscaling_cost.measure_code,
    "autoscaling-on-off": autoscaling_cost.measure_on_off,
    "plan-time": plan_time.measure,
    "live-b2-100": partial(isolation.measure, 100),
    "live-b2-weights": isolation.measure_weights,
    "live-b3": partial(overload.measure, "live-b3", ARENA, at_random, (1, 2, 5)),
    "live-b3-conv": partial(overload.measure, "live-b3-conv", CONV, as_it_was, (1, 5)),
    "live-b3-burst": overload.measure_burst,
    "live-b4-jobs": beside_batch.measure,
    "live-b6": dispatch_latency.measure,
}


def main() -> None:
    """Run the measurements that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("what", nargs="*", help=" or ".join(MEASUREMENTS), metavar="WHAT")
    parser.add_argument("--runs", type=int, default=3, help="runs to take the median of")
    parser.add_argument("--seconds", type=float, default=20, help="length of a loaded run")
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no cell is left behind
    unknown = set(words.what) - MEASUREMENTS.keys()
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}, only {', '.join(MEASUREMENTS)}")
    for name in words.what or [n for n in MEASUREMENTS if not n.startswith(BY_NAME_ONLY)]:
        MEASUREMENTS[name](words.runs, words.seconds)


if __name__ == "__main__":
    main()
