"""The chain of the audit log: whatever is done to it shows at the first record that is wrong."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.records.audit_chain import (
    GENESIS,
    AuditEvent,
    AuditRecord,
    ChainBroken,
    ChainHead,
    ChainVerifier,
    hash_line,
    shorten,
)

FIRST = 1_795_886_073_123


def chain(count: int) -> list[bytes]:
    lines: list[bytes] = []
    for number in range(count):
        record = AuditRecord(AuditEvent.INTENDED, "c", "ada", "tenants.add", f"tenant t{number}")
        previous = hash_line(lines[-1]) if lines else GENESIS
        lines.append(record.encode(FIRST + number, previous, 1000 + number))
    return lines


def verify(lines: list[bytes], *known: ChainHead) -> ChainHead | None:
    verifier = ChainVerifier(known)
    for line in lines:
        verifier.add(line)
    verifier.finish()
    return verifier.head


def heads(lines: list[bytes]) -> list[ChainHead]:
    return [ChainHead(FIRST + number, hash_line(line)) for number, line in enumerate(lines)]


def test_what_was_written_is_whole() -> None:
    """From the first record to the head, and with any head that was kept on the way."""
    lines = chain(5)
    assert verify(lines) == verify(lines, *heads(lines)) == heads(lines)[-1]
    assert verify([]) is None


def test_what_is_archived_may_be_missing_at_the_beginning() -> None:
    """If the head of the archive was kept; and nowhere else."""
    lines = chain(5)
    assert verify(lines[2:], heads(lines)[1], heads(lines)[3]) == heads(lines)[-1]
    for others in ([], [heads(lines)[0]], [heads(lines)[3]]):
        with pytest.raises(ChainBroken):
            verify(lines[2:], *others)


@given(at=st.integers(0, 3), data=st.data())
def test_a_changed_record_shows_at_the_next(at: int, data: st.DataObject) -> None:
    """Any byte of it."""
    lines = chain(5)
    place = data.draw(st.integers(0, len(lines[at]) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != lines[at][place]))
    lines[at] = lines[at][:place] + bytes([byte]) + lines[at][place + 1 :]
    with pytest.raises(ChainBroken):
        verify(lines)


@pytest.mark.parametrize("at", range(4))
def test_a_record_that_is_gone_is_missed(at: int) -> None:
    """The one behind it names it."""
    lines = chain(5)
    del lines[at]
    with pytest.raises(ChainBroken, match=str(FIRST + at + 1)):
        verify(lines)


def test_a_chain_that_was_made_anew_does_not_have_the_head_that_was_kept() -> None:
    """Nor has one whose end was cut off."""
    lines = chain(5)
    known = heads(lines)[3]
    with pytest.raises(ChainBroken, match="it is missing"):
        verify(lines[:3], known)
    other = [line.replace(b"ada", b"eve") for line in lines[:1]]
    for (_, after), sequence in zip(pairwise(lines), range(FIRST + 1, FIRST + 5), strict=True):
        record = AuditRecord(AuditEvent.DONE, "c", "eve", "x", "tenant x")
        assert after
        other.append(record.encode(sequence, hash_line(other[-1]), 0))
    assert verify(other)
    with pytest.raises(ChainBroken, match=str(known.sequence)):
        verify(other, known)


@pytest.mark.parametrize("text", ["", "1", "1:2", f"x:{GENESIS}", f"1:{GENESIS}0"])
def test_what_is_no_head_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="is no head"):
        ChainHead.parse(text)


def test_a_head_is_read_as_it_is_written() -> None:
    head = ChainHead(FIRST, GENESIS)
    assert ChainHead.parse(str(head)) == head


def test_a_large_value_is_told_by_its_size_and_hash() -> None:
    """A record must fit into a message, whatever a model's template is like."""
    assert shorten(None) is None
    assert shorten({"name": "x"}) == {"name": "x"}
    short = shorten({"name": "m", "versions": {"1": {"id": "1", "chat_template": "x" * 100_000}}})
    assert short["versions"]["1"]["id"] == "1"
    assert short["versions"]["1"]["chat_template"].keys() == {"bytes", "sha256"}
    many = shorten({str(number): "x" * 100 for number in range(1000)})
    assert many.keys() == {"bytes", "sha256"}
