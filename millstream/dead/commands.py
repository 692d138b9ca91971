"""The commands `millstream dead list`, `show`, `replay` and `drop`."""

import asyncio
import json
import sys

from millstream.admin.console_output import make_console
from millstream.dead import replays
from millstream.dead.rendering import describe, render_letter, render_table, summarize
from millstream.dead.replays import NotReplayable
from millstream.dead.settings import (
    DeadChangeSettings,
    DeadFilterSettings,
    DeadListSettings,
    DeadShowSettings,
)
from streams import topology
from streams.broker.broker_client import Broker, connect
from streams.broker.clock_sync import sample_once
from streams.errors import MillstreamError
from streams.records import dead_letters
from streams.records.dead_letters import DeadLetter

FAILED = 1


class NotConfirmed(MillstreamError):
    """Several dead letters match the filter of a `replay` or `drop`, and `--yes` was not given.

    Raised before anything was changed.
    """

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} dead letters match; say --yes if all of them are meant")


class DeadLetterNotFound(MillstreamError):
    """No stored dead letter has the given request id, or none matches the given filter."""


async def list_letters(settings: DeadListSettings, stop: asyncio.Event) -> None:
    """Print one line for each dead letter that matches the filter in the settings, oldest first.

    A dead letter is a request that no worker could finish, stored with the reason. If none matches,
    the table or JSON list is empty and nothing is raised.
    """
    async with connect(settings.nats, "dead", settings.nats_files) as broker:
        replayed = await replays.read_replays(broker)
        rows = [
            summarize(letter, replayed.get(letter.name))
            for letter in await _read_matching(broker, settings)
        ]
    if settings.as_json:
        print(json.dumps(rows, indent=2))
    else:
        make_console().print(render_table(rows))


async def show(settings: DeadShowSettings, stop: asyncio.Event) -> None:
    """Print one dead letter with its headers, parameters and attempts.

    The prompt and other text that the client wrote are never printed. Raises `DeadLetterNotFound`
    if no dead letter has the request id in the settings.
    """
    async with connect(settings.nats, "dead", settings.nats_files) as broker:
        letter = await _find_letter(broker, settings.request_id)
        facts = describe(letter, (await replays.read_replays(broker)).get(letter.name))
    if settings.as_json:
        print(json.dumps(facts, indent=2))
    else:
        make_console().print(render_letter(facts))


async def replay(settings: DeadChangeSettings, stop: asyncio.Event) -> int:
    """Queue the request of each chosen dead letter again, as a new request with a new id.

    The settings choose one letter by its id, or all that match a filter. A letter that was replayed
    before is not queued a second time. A letter whose headers are not those of a request is skipped
    with a message on stderr. Returns the exit status: 1 if a letter was skipped so, else 0.

    Raises `DeadLetterNotFound` if no letter is chosen, and `NotConfirmed` if several match the
    filter without `--yes`. Raises `LaneFull`, `Overloaded` or `BrokerUnavailable` at the first
    letter whose request could not be queued; the letters before that one were replayed, those after
    it were not.
    """
    async with connect(settings.nats, "dead", settings.nats_files) as broker:
        await sample_once(broker)
        return max([await _replay_one(broker, each) for each in await _select(broker, settings)])


async def _replay_one(broker: Broker, letter: DeadLetter) -> int:
    try:
        replayed, is_new = await replays.replay(broker, letter)
    except NotReplayable as error:
        print(error, file=sys.stderr)
        return FAILED
    print(f"{letter.name} {'is' if is_new else 'was already'} replayed as {replayed.request_id}")
    return 0


async def drop(settings: DeadChangeSettings, stop: asyncio.Event) -> None:
    """Delete the chosen dead letters for good: one by its id, or all that match a filter.

    Raises `DeadLetterNotFound` if none is chosen, and `NotConfirmed` if several match the filter
    without `--yes`. A letter that somebody else deletes meanwhile raises nothing.
    """
    async with connect(settings.nats, "dead", settings.nats_files) as broker:
        for letter in await _select(broker, settings):
            await broker.remove(topology.DEAD, letter.seq)  # no error if it is gone already
            print(f"{letter.name} is dropped")


async def _select(broker: Broker, settings: DeadChangeSettings) -> list[DeadLetter]:
    """The letters that the settings choose: one by its id, or all that match the filter.

    Raises `DeadLetterNotFound` if there is none, `NotConfirmed` if there are several without
    `--yes`.
    """
    if settings.request_id:
        return [await _find_letter(broker, settings.request_id)]
    letters = await _read_matching(broker, settings)
    if not letters:
        raise DeadLetterNotFound("no dead letter matches")
    if len(letters) > 1 and not settings.yes:
        raise NotConfirmed(len(letters))
    return letters


async def _find_letter(broker: Broker, name: str) -> DeadLetter:
    for letter in await dead_letters.read_dead_letters(broker):
        if letter.name == name:
            return letter
    raise DeadLetterNotFound(f"there is no dead letter {name!r}")


async def _read_matching(broker: Broker, settings: DeadFilterSettings) -> list[DeadLetter]:
    letters = await dead_letters.read_dead_letters(broker, settings.tenant, settings.model)
    if settings.since is None:
        return letters
    await sample_once(broker)
    return [each for each in letters if -broker.clock.seconds_until(each.ended) <= settings.since]
