"""Records of stored files: what is in which chunk, and what ends when."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from streams import job_subjects
from streams.records.files.file_records import FilePart, FileState, StoredFile

FILE = StoredFile("acme", "f1", "in.jsonl", "batch", created_at=100, size=5, expires_at=200)


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(0, 100), st.integers(0, 100))
def test_chunk_ranges_cover_exactly_what_was_asked_for(
    sizes: list[int], start: int, length: int
) -> None:
    """Whatever parts a file consists of, and wherever it is read."""
    parts = tuple(FilePart(f"p{n}", size, 7, is_whole=True) for n, size in enumerate(sizes))
    file = FILE.as_ready(parts)
    whole = [(part.id, offset) for part in parts for offset in range(part.size)]
    found = []
    for subject, first, end in file.chunk_ranges(start, start + length):
        _, _, _, part, number = subject.split(".")
        assert 0 <= first < end <= 7
        found += [(part, int(number) * 7 + within) for within in range(first, end)]
    assert found == whole[start : start + length]


def test_a_record_is_the_same_after_it_was_stored() -> None:
    """With all its parts; fields of later versions are ignored."""
    file = replace(FILE.with_part(FilePart("p1", 5, is_whole=True)), unused=("p0",), key="k1")
    assert StoredFile.unpack(file.pack(), 7) == replace(file, revision=7)


def test_a_file_is_gone_when_it_was_deleted_or_its_time_is_over() -> None:
    """At that very second; a file without an end stays."""
    assert not FILE.is_gone(199.9)
    assert FILE.is_gone(200)
    assert not replace(FILE, expires_at=None).is_gone(1e12)
    assert replace(FILE, state=FileState.DELETED).is_gone(0)


def test_parts_that_a_file_does_not_consist_of_are_remembered() -> None:
    """Else nobody would remove their bytes."""
    pending = FILE.with_part(FilePart("a", 2, is_whole=True)).with_part(FilePart("b"))
    ready = replace(pending, expires_after_seconds=50).as_ready((pending.parts[0],))
    assert (ready.unused, ready.size, ready.expires_at) == (("b",), 2, 150)


def test_parts_have_subjects_of_their_own() -> None:
    """The filter of one part matches no other's chunks."""
    assert job_subjects.file_chunk("acme", "p1", 3) == "infer.file.acme.p1.3"
    assert job_subjects.file_chunks("acme", "p1") == "infer.file.acme.p1.*"
    assert job_subjects.file_record("acme", "f1") == "$KV.files.acme.f1"
