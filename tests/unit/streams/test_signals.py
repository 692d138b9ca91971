"""Signals have bodies of their kind, and come from the broker's stream of signals alone."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from streams import messages, signals, subjects, topology
from streams.coordination.signal_handler import check_heard
from streams.signals import DrainAccepted, DrainReport, InvalidSignal

SECRET = "a prompt"
PUB_ACK = b'{"stream":"INGRESS_acme","seq":7}'
STORED = messages.pack({"type": "chunk", "text": SECRET})
PARSERS = (signals.parse_cancel, signals.parse_drain, signals.parse_gone)
CANCEL, DRAIN = subjects.cancel("acme", "0a"), subjects.drain("w1")
HEARD = subjects.heard(CANCEL)
COPIED = {"Nats-Stream": topology.SIGNALS, "Nats-Subject": CANCEL}


@pytest.mark.parametrize("signal", [CANCEL, DRAIN, subjects.GONE])
def test_what_the_broker_copied_is_heard(signal: str) -> None:
    check_heard(subjects.heard(signal), {**COPIED, "Nats-Subject": signal})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Status": "404"},
        {**COPIED, "Status": "404"},
        {**COPIED, "Nats-Stream": "TOKENS_0"},
        {**COPIED, "Nats-Subject": subjects.cancel("evil", "0a")},
        {"Nats-Stream": topology.SIGNALS},
    ],
)
def test_what_came_another_way_is_not(headers: dict[str, str]) -> None:
    """An answer of the broker that was sent there, or a message that somebody read and sent on."""
    with pytest.raises(InvalidSignal):
        check_heard(HEARD, headers)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("body", [PUB_ACK, STORED, b"\xff", b"[]", b"{}", b'{"within":"1"}'])
def test_no_other_body_is_taken_for_a_signal(
    parse: Callable[[str, bytes], Any], body: bytes
) -> None:
    """Nor is anything of it told, since it may be what a client has written."""
    with pytest.raises(InvalidSignal) as refused:
        parse(HEARD, body)
    assert SECRET not in str(refused.value)


def test_a_cancel_names_its_request() -> None:
    assert signals.parse_cancel(HEARD, b"") == ("acme", "0a")


def test_a_death_names_its_worker() -> None:
    assert signals.parse_gone(subjects.heard(subjects.GONE), b"worker-1") == "worker-1"
    with pytest.raises(InvalidSignal):
        signals.parse_gone(subjects.heard(subjects.GONE), b"")


@pytest.mark.parametrize("within", [0, 0.5, 20])
def test_a_drain_order_names_its_seconds(within: float) -> None:
    assert signals.parse_drain(DRAIN, signals.pack_drain(within)) == within


@pytest.mark.parametrize("within", [-1, float("nan"), float("inf"), True, None, "20"])
def test_a_drain_order_with_no_time_is_none(within: object) -> None:
    with pytest.raises(InvalidSignal):
        signals.parse_drain(DRAIN, json.dumps({"within": within}).encode())


@pytest.mark.parametrize("answer", [DrainAccepted(12.5), DrainReport(3, 0), DrainReport(0, 2)])
def test_an_answer_to_a_drain_order_is_understood(answer: DrainAccepted | DrainReport) -> None:
    assert signals.parse_drain_answer(signals.pack_drain_answer(answer)) == answer


@pytest.mark.parametrize("body", [PUB_ACK, STORED, b"", b'{"finished": 1}', b'{"within": -1}'])
def test_no_other_message_is_taken_for_an_answer(body: bytes) -> None:
    """An operator who believed it would take the machine away."""
    with pytest.raises(InvalidSignal):
        signals.parse_drain_answer(body)
