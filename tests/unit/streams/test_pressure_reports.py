"""A load report is believed only if it is one: garbage must not stop who listens."""

from typing import Any

import pytest

from streams import messages, subjects
from streams.coordination.pressure_reports import InvalidPressure, parse_pressure
from streams.messages import Pressure, ServiceTime

SUBJECT = subjects.pressure("m")
SOUND = Pressure(
    model="m",
    workers=1,
    queued={"standard": 3},
    wait_seconds={"standard": 0.5, "batch": None},
    tenants={"acme": {"standard": 2.0}},
    seconds_per_token=0.001,
    compute=ServiceTime(first=0.1, per_prompt_token=-0.001),
    room_tokens={"standard": 12.0},
    arrived={"standard": (1, 20, 30)},
)


def changed(**fields: Any) -> bytes:
    return messages.pack({**messages.unpack(SOUND.pack()), **fields})


def test_a_report_is_read_as_it_was_sent() -> None:
    assert parse_pressure(SUBJECT, {}, SOUND.pack()).pack() == SOUND.pack()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        messages.pack(7),
        messages.pack([1, 2]),
        messages.pack({"model": "m"}),
        changed(model=["m"]),
        changed(model="other"),
        changed(workers="1"),
        changed(workers=float("nan")),
        changed(queued=[1]),
        changed(queued={1: 2}),
        changed(tenants={"acme": 3}),
        changed(tenants={"acme": {"standard": "x"}}),
        changed(arrived={"standard": [1, 2]}),
        changed(arrived={"standard": [1, 2, float("inf")]}),
        changed(compute=5),
        changed(compute={"first": "x"}),
    ],
)
def test_anything_else_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidPressure):
        parse_pressure(SUBJECT, {}, payload)


def test_an_answer_of_the_broker_is_none() -> None:
    """Whoever sends a question with this reply subject would have the broker publish there."""
    with pytest.raises(InvalidPressure, match="headers"):
        parse_pressure(SUBJECT, {"Status": "503"}, SOUND.pack())
