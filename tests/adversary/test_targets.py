"""No stream, no subject and no operation is missing among the targets."""

import pytest

from streams import topology
from streams.accounts import access
from streams.topology import Scale
from tests.adversary.api_calls import stream_names
from tests.adversary.target_subjects import (
    MADE_UP,
    MARK,
    Names,
    covers,
    granted_patterns,
    stored_patterns,
    subjects_of,
)

TARGETS = subjects_of(MADE_UP)
VICTIM = Names("northwind", "mock", "r1", "gw-g1", "w1", "pool", "_INBOX.g1.x")


def test_subjects_are_each_filled_in() -> None:
    """A subject with a wildcard in it would be one that nobody listens to."""
    assert len(TARGETS) == len(set(TARGETS))
    assert not [each for each in TARGETS if "*" in each or ">" in each or "{" in each]


def test_everything_declared_and_granted_is_a_target() -> None:
    """A new stream, bucket or right is attacked without a word about it here."""
    streams = [*topology.stream_configs(Scale(), 1)]
    streams += [topology.ingress_stream(MARK), topology.answers_stream(MARK)]
    patterns = [each for config in streams for each in config.subjects or []]
    patterns += [*stored_patterns(), *granted_patterns()]
    assert [p for p in patterns if not any(covers(p, each) for each in TARGETS)] == []
    named = {config.name for config in streams}
    assert {*named, *access.BUCKETS} <= set(stream_names(MARK))


@pytest.mark.parametrize("made", [TARGETS, subjects_of(VICTIM)])
def test_an_unknown_stream_is_a_target(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tenant's name in the first place, for victims and made-up names alike."""
    known = topology.stream_configs(Scale(), 1)
    new = topology.audit_stream(1)
    new.subjects = ["infer.novel.*.*"]
    monkeypatch.setattr(topology, "stream_configs", lambda *_: [*known, new])
    names = MADE_UP if made is TARGETS else VICTIM
    found = set(subjects_of(names)) - set(made)
    assert found == {f"infer.novel.{names.tenant}.{MARK}"}


def test_targets_of_all_names_come_in_one_order() -> None:
    """Attacks put a made-up subject where another one is a class's job."""
    assert len(subjects_of(VICTIM)) == len(TARGETS)
