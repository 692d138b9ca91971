"""`millstream bench`: puts an open- or closed-loop load on a gateway and reports latencies.

settings, target  what to send, and which models the gateway offers
arrivals, prompts  when requests are due, how long they are, and their tokens (pure)
load_generator    sends them on time or on answer, then waits for the rest
load_client       what a client must do; websocket_client and sse_client (over http_connection)
                  do it, with a sample for each request
load_statistics   samples become percentiles, rates, errors (pure); cpu_usage adds CPU per token
curve_bench, curve_fit  with --curve: many loads, and the times of steps that fit them (pure)
report_output, plot  progress bar, tables, JSON, PNG
"""

import asyncio

from millstream.bench.settings import BenchSettings


async def run(settings: BenchSettings, stop: asyncio.Event) -> int:
    """Run the load until it ends or `stop` is set, print its report, and return the exit status.

    The status is 1 if no request was completed, else 0. The errors raised are those of
    `load_generator.run`; requests that fail are counted in the report and not raised. With
    `settings.curve` a curve is measured and stored instead: see `curve_bench.measure_curve`.
    """
    # Imported here: every command imports this package for its settings, only bench needs the rest.
    if settings.curve:
        from millstream.bench.curve_bench import measure_curve

        return await measure_curve(settings, stop)
    from millstream.bench.load_generator import run

    return await run(settings, stop)
