"""Shows a load to a person: a progress bar while it runs, tables or JSON when it is over."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Protocol

import orjson
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from millstream.bench.load_statistics import LoadReport, Spread, Tally
from millstream.bench.settings import BenchSettings
from millstream.bench.target import TargetModel

LABELS = {
    "ttft": "time to first token",
    "ttft_since_sent": "  … since it was sent",
    "inter_token": "inter-token",
    "end_to_end": "end to end",
    "end_to_end_since_sent": "  … since it was sent",
}
COUNTS = "{task.fields[done]} done  {task.fields[running]} running  {task.fields[failed]} failed"
RATE = "{task.fields[rate]:,.0f} tokens/s"


class RunningLoad(Protocol):
    """The interface by which a progress bar reads a load in progress; `LoadGenerator` has it.

    `elapsed` is the number of seconds since the start, `running` the number of requests that were
    sent and have not ended, and `tally` the counts of those that have ended.
    """

    tally: Tally

    @property
    def elapsed(self) -> float: ...

    @property
    def running(self) -> int: ...


def print_report(
    settings: BenchSettings,
    models: list[TargetModel],
    summary: LoadReport,
    cpu: Mapping[str, float | None],
) -> None:
    """Print a load's report to stdout, as JSON if `settings.as_json`, else as tables.

    `cpu` is added to the report: the CPU time in µs per token by process name, None for a process
    that has ended.
    """
    summary = replace(summary, cpu_us_per_token=dict(cpu))
    if settings.as_json:
        print(to_json(settings, models, summary))
    else:
        Console().print(render_report(models, summary))


def to_json(settings: BenchSettings, models: list[TargetModel], summary: LoadReport) -> str:
    """Return the settings of a load and its report as one indented JSON text.

    The object has the entries `load` and `report`. The API key is never included, nor are settings
    that do not describe the load, such as `log_level`.
    """
    load = settings.model_dump(
        mode="json", exclude={"api_key", "as_json", "config", "log_level", "plot", "pids"}
    )
    load["model"] = [model.name for model in models]
    return orjson.dumps(
        {"load": load, "report": asdict(summary)}, option=orjson.OPT_INDENT_2
    ).decode()


def render_report(models: list[TargetModel], summary: LoadReport) -> Group:
    """Return a load's report for a terminal: lines of totals, and tables of the distributions."""
    parts: list[RenderableType] = [*_summary_lines(models, summary)]
    parts.append(_spread_table("latency, ms", summary.latencies_ms))
    if summary.stages_ms:
        parts.append(_spread_table("stage, ms", summary.stages_ms))
    parts.append(_cpu_table(summary.cpu_us_per_token))
    return Group(*parts)


def _summary_lines(models: list[TargetModel], summary: LoadReport) -> Iterator[str]:
    names = ", ".join(model.name for model in models)
    failed = ", ".join(f"{count} {code}" for code, count in summary.errors.items())
    yield (
        f"{names}: {summary.completed} of {summary.requests} requests completed"
        + (f"; {failed}" if failed else "")
    )
    yield (
        f"{summary.prompt_tokens:,} tokens in, {summary.output_tokens:,} out, "
        f"{summary.tokens_per_chunk:.2f} per chunk"
    )
    yield (
        f"within the {summary.seconds:.1f} s of load: {summary.tokens_per_second:,.1f} tokens/s, "
        f"{summary.requests_per_second:,.2f} requests/s"
    )
    if summary.later_attempts:
        yield f"{summary.later_attempts} later attempts after failures"


def _spread_table(title: str, spreads: Mapping[str, Spread]) -> Table:
    table = Table("", "p50", "p95", "p99", "mean", "max", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, s in spreads.items():
        values = (s.p50, s.p95, s.p99, s.mean, s.max)
        table.add_row(LABELS.get(name, name), *(f"{value:,.2f}" for value in values))
    return table


def _cpu_table(cpu: Mapping[str, float | None]) -> Table:
    table = Table("CPU of", "µs per token")
    table.columns[1].justify = "right"
    for name, us in cpu.items():
        table.add_row(name, "gone" if us is None else f"{us:,.1f}")
    return table


@contextmanager
def show_progress(settings: BenchSettings, load: RunningLoad) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr during the `with` block; yield a function that redraws it.

    The function takes no argument and reads `load`. The bar is not redrawn unless it is called.
    """
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn(COUNTS), TextColumn(RATE))
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(
            "load",
            total=settings.seconds or settings.requests,
            done=0,
            running=0,
            failed=0,
            rate=0.0,
        )
        yield lambda: _update_bar(bar, task, settings, load)


def _update_bar(bar: Progress, task: TaskID, settings: BenchSettings, load: RunningLoad) -> None:
    tally = load.tally
    bar.update(
        task,
        completed=load.elapsed if settings.seconds else tally.done + tally.failed,
        done=tally.done,
        running=load.running,
        failed=tally.failed,
        rate=tally.tokens / max(load.elapsed, 1e-9),
        refresh=True,
    )
