"""`millstream lag`: prints every lane and every worker as the dispatchers report them now."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from millstream.admin.console_output import ANSWER_SECONDS, NOT_FOUND, make_console
from millstream.admin.fitted_table import Column, FittedTable
from millstream.admin.settings import LagSettings
from registry.store import Registry
from streams import subjects
from streams.broker.broker_client import Broker, connect

WATCH_SECONDS = 1.0
_LANE_COLUMNS = (
    Column("tenant", "name"),
    Column("model", "name"),
    Column("priority"),
    Column("queued", is_number=True),
    Column("tokens", is_number=True),
    Column("oldest\nage", is_number=True),
    Column("in\nflight", is_number=True),
    Column("estimated\nwait", is_number=True),
)
_WORKER_COLUMNS = (
    Column("worker", "name"),
    Column("model", "name"),
    Column("version", "name", rank=1),
    Column("running", is_number=True),
    Column("waiting", is_number=True, rank=2),
    Column("free\nsequences", is_number=True, rank=3),  # follows from what is running
    Column("free KV tokens", "text", least=12, is_number=True),
    Column("tokens/s", is_number=True),
    Column("state"),
)
LagReport = dict[str, Any]


async def run(settings: LagSettings, stop: asyncio.Event) -> int:
    """Print all queues and workers once, or with `settings.watch` every second until `stop` is set.

    Returns the exit status. Without `watch` it is 1 if the dispatcher of a registered model does
    not answer within 2 s, else 0. With `watch` it is always 0; a closed pipe on stdout also ends
    the loop.
    """
    async with connect(settings.nats, "lag", settings.nats_files) as broker:
        registry = await Registry.open(broker)
        try:
            if settings.watch:
                return await _watch(broker, registry, settings.as_json, stop)
            report = await collect_report(broker, registry)
            if settings.as_json:
                print(json.dumps(report, indent=2))
            else:
                make_console(_PipeConsole).print(render_report(report))
            return NOT_FOUND if report["unanswered"] else 0
        finally:
            await registry.close()


async def collect_report(broker: Broker, registry: Registry) -> LagReport:
    """Ask the dispatcher of each registered model for its report, and merge the reports into one.

    The result has `lanes`, those with most queued tokens first; `lanes_left_out`, how many more
    there are than a dispatcher reports; `workers`; and `unanswered`: the names of the models whose
    dispatcher gave no answer.
    """
    models = list(registry.models)
    answers = await asyncio.gather(*(_request_report(broker, model) for model in models))
    answered = [answer for answer in answers if answer]
    lanes = [lane for answer in answered for lane in answer["lanes"]]
    return {
        "lanes": sorted(lanes, key=lambda lane: -lane["tokens"]),
        "lanes_left_out": sum(answer["lanes_left_out"] for answer in answered),
        "workers": [worker for answer in answered for worker in answer["workers"]],
        "unanswered": [m for m, answer in zip(models, answers, strict=True) if not answer],
    }


async def _request_report(broker: Broker, model: str) -> LagReport | None:
    answer = await broker.request(subjects.report(model), b"", ANSWER_SECONDS)
    return json.loads(answer) if answer else None


async def _watch(broker: Broker, registry: Registry, as_json: bool, stop: asyncio.Event) -> int:
    with _open_view(as_json) as show:
        while not stop.is_set():
            report = await collect_report(broker, registry)
            try:
                show(report)
            except BrokenPipeError:  # from `| head`; Python will flush stdout once more at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                break
            try:
                async with asyncio.timeout(WATCH_SECONDS):
                    await stop.wait()
            except TimeoutError:
                pass
    return 0


@contextmanager
def _open_view(as_json: bool) -> Iterator[Callable[[LagReport], None]]:
    """A function that shows a report: in place of the last on a terminal, else below it."""
    console = make_console(_PipeConsole)
    if as_json:
        yield lambda report: print(json.dumps(report), flush=True)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda report: live.update(render_report(report), refresh=True)
    else:
        yield lambda report: console.print(render_report(report))


class _PipeConsole(Console):
    """A console that raises `BrokenPipeError`; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def render_report(report: LagReport) -> Group:
    """Render a report as tables of lanes and workers, and a line of unanswered models."""
    parts: list[FittedTable | str] = [_lane_table(report["lanes"])]
    if left_out := report["lanes_left_out"]:
        parts.append(f"{left_out:,} more lanes, with fewer tokens, are not shown.")
    parts.append(_worker_table(report["workers"]))
    if report["unanswered"]:
        parts.append(f"No dispatcher answers for: {', '.join(report['unanswered'])}")
    return Group(*parts)


def _lane_table(lanes: list[LagReport]) -> FittedTable:
    rows = [
        (
            lane["tenant"],
            lane["model"],
            lane["priority"],
            _format_queued(lane),
            f"{lane['tokens']:,}",
            _format_seconds(lane["oldest_age_seconds"]),
            f"{lane['in_flight']:,}",
            _format_seconds(lane["estimated_wait_seconds"]),
        )
        for lane in lanes
    ]
    return FittedTable(_LANE_COLUMNS, rows, "Lanes")


def _format_queued(lane: LagReport) -> str:
    """The queued requests, and behind a plus the submissions that are not accepted yet."""
    submitted = lane["submissions"]
    return f"{lane['queued']:,}" + (f" +{submitted:,}" if submitted else "")


def _worker_table(workers: list[LagReport]) -> FittedTable:
    rows = [
        (
            worker["worker"],
            worker["model"],
            worker["version"],
            f"{worker['running']} of {worker['max_sequences']}",
            f"{worker['waiting']}",
            f"{worker['free_sequences']:,}",
            f"{worker['free_tokens']:,} of {worker['kv_tokens']:,}",
            f"{worker['tokens_per_second']:,.0f}",
            _worker_state(worker),
        )
        for worker in workers
    ]
    return FittedTable(_WORKER_COLUMNS, rows, "Workers")


def _worker_state(worker: LagReport) -> str:
    if worker["draining"]:
        return "draining"
    return "serving" if worker.get("resident", True) else "not loaded"


def _format_seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} s"
