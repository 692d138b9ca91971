"""A beat is believed of the gateway whose subject it came on, and of no other."""

from dataclasses import replace
from typing import Any

import pytest

from streams import subjects
from streams.coordination.gateway_beats import (
    GatewayBeat,
    InvalidGatewayBeat,
    parse_gateway_beat,
)

BEAT = GatewayBeat("g1", 3, 100, 1.5, 0.001)
SUBJECT = subjects.gateway("g1")


def test_its_own_beat_is_believed() -> None:
    """Whole seconds come as whole numbers."""
    for beat in (BEAT, replace(BEAT, preparation_seconds=0, draining=True)):
        assert parse_gateway_beat(SUBJECT, {}, beat.pack()) == beat


@pytest.mark.parametrize(
    "change",
    [
        {"gateway": "g2"},
        {"gateway": ">"},
        {"gateway": 7},
        {"connections": -1},
        {"connections": True},
        {"requests": 2**60},
        {"requests": 1.5},
        {"preparation_seconds": float("nan")},
        {"preparation_seconds": "1"},
        {"loop_lag_seconds": float("inf")},
        {"draining": 1},
    ],
    ids=repr,
)
def test_what_no_gateway_says_is_refused(change: dict[str, Any]) -> None:
    """Nobody reckons with it."""
    with pytest.raises(InvalidGatewayBeat):
        parse_gateway_beat(SUBJECT, {}, replace(BEAT, **change).pack())


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\xc1", b"\x07", BEAT.pack()[:-3]])
def test_what_cannot_be_read_is_none(payload: bytes) -> None:
    """Nor does it raise anything else."""
    with pytest.raises(InvalidGatewayBeat):
        parse_gateway_beat(SUBJECT, {}, payload)


def test_an_answer_of_the_broker_is_none() -> None:
    """A stored message can be delivered there by whoever may read it."""
    with pytest.raises(InvalidGatewayBeat):
        parse_gateway_beat(SUBJECT, {"Nats-Stream": "LEDGER"}, BEAT.pack())
