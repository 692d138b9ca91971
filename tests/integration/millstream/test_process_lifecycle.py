"""The life of a process: signals, the drain clock, exit status, what is logged."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

SCRIPT = """
import asyncio, sys, time
from millstream.process_lifecycle import run_process
from streams.errors import Overloaded
from streams.base_settings import {settings} as Base

class Settings(Base):
    @property
    def shutdown_timeout_seconds(self): return 0.3

async def run(settings, stop):
    print("running", flush=True)
    {body}

sys.exit(run_process(run, Settings()))
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process whose service is `body`; returns once the body runs."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str, settings: str = "ServiceSettings") -> "subprocess.Popen[str]":
        code = SCRIPT.format(body=body, settings=settings)
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True
        )
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == "running\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def events(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.communicate(timeout=10)[1].splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(start: Start, number: signal.Signals) -> None:
    """The service is told, ends in its own time, and that is a success."""
    process = start("await stop.wait(); await asyncio.sleep(0.05)")
    process.send_signal(number)
    assert [event["event"] for event in events(process)] == ["draining"]
    assert process.returncode == 0


def test_the_second_signal_kills_even_when_the_loop_is_stuck(start: Start) -> None:
    """A person who presses Ctrl-C twice wants it to end now."""
    process = start("await stop.wait(); print('stuck', flush=True); time.sleep(60)")
    process.terminate()
    assert process.stdout
    assert process.stdout.readline() == "stuck\n"
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM


def test_a_service_that_does_not_drain_in_time_is_stopped_and_fails(start: Start) -> None:
    """Whoever waits for this process must not wait for ever, and should learn that work was cut."""
    process = start("await stop.wait(); await asyncio.sleep(60)")
    process.terminate()
    last = events(process)[-1]
    assert (last["event"], last["kind"], process.returncode) == ("stopped", "DrainTimeout", 1)


def test_an_expected_error_is_one_event_without_traceback(start: Start) -> None:
    """The operator needs the sentence; where our code raised it does not help."""
    process = start("raise Overloaded('too much')")
    (event,) = events(process)
    assert (event["event"], event["error"], event["kind"]) == ("stopped", "too much", "Overloaded")
    assert "exception" not in event
    assert process.returncode == 1


def test_our_own_fault_is_logged_with_its_traceback_and_without_its_variables(
    start: Start,
) -> None:
    """A bug must be findable; a local variable may hold a prompt or a key."""
    process = start("prompt = 'sec' + 'ret'; assert not prompt")
    (event,) = events(process)
    assert "AssertionError" in event["exception"]
    assert "secret" not in event["exception"]
    assert process.returncode == 1


def test_a_command_for_people_says_a_sentence(start: Start) -> None:
    """`millstream lag` without a server is no place for JSON."""
    process = start("raise Overloaded('too much')", settings="ClientSettings")
    assert process.communicate(timeout=10)[1] == "millstream: too much\n"


def test_the_first_error_of_a_group_ends_the_process(start: Start) -> None:
    """A service is a task group: the error of one task is the service's."""
    body = """
    async def fail(): raise Overloaded("first")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())
        tasks.create_task(asyncio.sleep(60))"""
    process = start(body)
    assert events(process)[-1]["error"] == "first"


def test_libraries_log_in_the_same_form(start: Start) -> None:
    """One parser reads every line."""
    process = start("import logging; logging.getLogger('uvicorn').warning('a %s', 'b')")
    (event,) = events(process)
    assert (event["event"], event["level"]) == ("a b", "warning")
