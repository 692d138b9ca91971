"""Load reports of dispatchers, checked before they are believed. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from math import isfinite

from streams import subjects
from streams.messages import Pressure, ServiceTime


class InvalidPressure(ValueError):
    """A message is no load report on the model that its subject names."""


def parse_pressure(subject: str, headers: Mapping[str, str], payload: bytes) -> Pressure:
    """Return the load report that was heard on a subject; raises `InvalidPressure`.

    It has no headers, as an answer of the broker that somebody had sent here would have, names the
    model of its subject, and has finite numbers.
    """
    if headers:
        raise InvalidPressure("it has headers: it is an answer of the broker")
    try:
        pressure = Pressure.unpack(payload)
        is_own = subjects.pressure(pressure.model) == subject
        is_sound = all(map(_is_number, _numbers(pressure))) and _names_are_text(pressure)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidPressure(f"its {len(payload)} bytes are no load report") from error
    if not is_own:
        raise InvalidPressure("it names another model than its subject")
    if not is_sound:
        raise InvalidPressure("it has something else where finite numbers and names should be")
    return pressure


def _numbers(pressure: Pressure) -> Iterator[object]:
    """Yield each number; raises an error where something else is than a map or a list."""
    yield from (pressure.workers, *pressure.queued.values())
    yield from (pressure.earliest_deadline, *pressure.queued_tokens.values())
    yield from (pressure.unmanned_seconds, pressure.uncertainty, *pressure.room_tokens.values())
    yield from _known(pressure.wait_seconds.values())
    yield from _known([pressure.seconds_per_token])
    for waits in pressure.tenants.values():
        yield from waits.values()
    for requests, prompt_tokens, output_tokens in pressure.arrived.values():
        yield from (requests, prompt_tokens, output_tokens)
    if isinstance(pressure.compute, ServiceTime):
        yield from _known(astuple(pressure.compute))
    elif pressure.compute is not None:
        raise TypeError("the service time is none")


def _known(values: Iterable[object]) -> Iterator[object]:
    return (value for value in values if value is not None)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and isfinite(value)  # type: ignore[arg-type]


def _names_are_text(pressure: Pressure) -> bool:
    maps: list[Iterable[object]] = [pressure.queued, pressure.wait_seconds, pressure.room_tokens]
    maps += [pressure.arrived, pressure.queued_tokens, pressure.tenants]
    maps += pressure.tenants.values()
    return type(pressure.model) is str and all(type(name) is str for each in maps for name in each)
