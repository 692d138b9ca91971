"""Converts a demo model at its first use, in a process of its own so that its memory is freed.

That process, `python -m millstream.up.demo_conversion_process NAME CACHE`, prints one JSON line per
stage and, last, the model's directory.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gpu_worker.engines import demo_models
from millstream.up.child_process import die_with_parent
from streams.errors import MillstreamError


class ConversionFailed(MillstreamError):
    """The conversion of the demo model `name` failed; `log` is the file with its stderr.

    The message ends with the log's last line and path.
    """

    def __init__(self, name: str, log: Path) -> None:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        super().__init__(f"{name} could not be prepared: {last}; see {log}")
        self.name, self.log = name, log


def cache_directory() -> Path:
    """Return the directory in which converted demo models are kept, one for all data directories.

    The path is that in the environment variable `MILLSTREAM_CACHE_DIR`, else
    `~/.cache/millstream`, with `~` expanded. The directory is not created.
    """
    return Path(os.environ.get("MILLSTREAM_CACHE_DIR", "~/.cache/millstream")).expanduser()


async def convert_demo_model(name: str, log: Path) -> Path:
    """Convert the demo model `name` if the cache lacks it, and return the converted directory.

    The conversion runs in a child process and takes about a minute; this waits for its end and
    shows a progress bar on stderr. The child's stderr is written to the file `log`. Raises
    `ConversionFailed` if the child fails. Cancelling kills the child and leaves no incomplete model
    in the cache.
    """
    directory = ""
    async with _conversion_process(name, log) as process:
        assert process.stdout
        with _make_progress_bar(name) as bar:
            async for line in process.stdout:
                progress = json.loads(line)
                directory = progress.get("directory", directory)
                _show_progress(bar, progress)
        if await process.wait() != 0:
            raise ConversionFailed(name, log)
    return Path(directory)


@asynccontextmanager
async def _conversion_process(name: str, log: Path) -> AsyncIterator[Process]:
    command = (sys.executable, "-m", __name__, name, str(cache_directory()))
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=errors,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _make_progress_bar(name: str) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(f"preparing {name}", total=1.0, visible=False)
    return bar


def _show_progress(bar: Progress, progress: dict[str, Any]) -> None:
    """Show a stage; the bar stays hidden for a model that is converted already."""
    if "stage" in progress:
        text = f"preparing the model, once: {progress['stage']}"
        if not bar.console.is_terminal and text != bar.tasks[0].description:
            bar.console.print(text)  # a file or pipe shows no bar
        bar.update(bar.task_ids[0], completed=progress["done"], description=text, visible=True)


def main(name: str, cache: str) -> None:
    """Convert the demo model `name` into the directory `cache`, unless it is there already.

    This is the main function of the child process that `convert_demo_model` starts. Prints JSON
    lines to stdout: for each stage of the conversion `stage` and `done` (its share, 0 to 1), and
    last the model's `directory`.
    """
    directory = demo_models.find_model(
        name, Path(cache), lambda stage, done: _print_json(stage=stage, done=done)
    )
    _print_json(directory=str(directory))


def _print_json(**facts: str | float) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
