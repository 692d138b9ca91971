"""A writer tells its log page by page, from where its reader lacks something."""

from hypothesis import given
from hypothesis import strategies as st

from streams import messages
from streams.records.token_log_cache import RecordPage, RecordsQuery, TokenLogCache

START = {"type": "started", "attempt": 1}
AGAIN = {"type": "started", "attempt": 2}


def chunk(index: int, count: int) -> dict[str, object]:
    text = {"characters": index, "text": "x" * count}
    return {"type": "chunk", "index": index, "count": count} | text


def written(counts: list[int], claimed_at: int) -> TokenLogCache:
    """A log of two attempts, the second of which begins before that many chunks."""
    log, index = TokenLogCache(), 0
    log.add(3, messages.pack(START), is_claim=True)
    for place, count in enumerate(counts):
        if place == claimed_at:
            log.add(5 + 2 * place, messages.pack(AGAIN), is_claim=True)
        log.add(6 + 2 * place, messages.pack(chunk(index, count)))
        index += count
    return log


def question(seq: int, after: int = -1, most_bytes: int = 100) -> RecordsQuery:
    return RecordsQuery("acme", "r", seq, after, most_bytes)


def told(log: TokenLogCache, after: int, most_bytes: int) -> list[tuple[int, bytes]]:
    """What a reader gets that asks on from the last record it has, until nothing is left."""
    page = log.read_page(question(1, after, most_bytes))
    found = page.records
    while page.remaining:
        page = log.read_page(question(found[-1][0], after, most_bytes))
        assert page.records[0] == found[-1]
        assert len(page.records) > 1
        found = found + page.records[1:]
    return found


COUNTS = st.lists(st.integers(1, 4), min_size=1, max_size=30)


@given(COUNTS, st.integers(0, 30), st.integers(-1, 130), st.integers(0, 300))
def test_a_reader_is_told_what_it_lacks(
    counts: list[int], claimed_at: int, after: int, most_bytes: int
) -> None:
    """All from the record on that holds its next token, and the claim of whoever writes."""
    log = written(counts, claimed_at)
    everything = [messages.unpack(data) for data in log.records]
    first, *rest = [messages.unpack(data) for _, data in told(log, after, most_bytes)]
    assert rest == everything[len(everything) - len(rest) :]
    assert first == everything[-len(rest) - 1] or first["type"] == "started"
    claims = [record for record in everything if record["type"] == "started"]
    assert claims[-1] in [first, *rest]
    chunks = [record for record in [first, *rest] if record["type"] == "chunk"]
    assert chunks[0]["index"] <= after + 1
    assert all(record["index"] > after + 1 for record in chunks[1:])


def test_text_behind_a_token_is_told_with_all_that_follows_the_token() -> None:
    """It is a chunk of no tokens; another attempt may go on behind it, at the same index."""
    log = TokenLogCache()
    contents = [START, chunk(0, 2), chunk(2, 0), AGAIN, chunk(2, 0), chunk(2, 1), chunk(3, 1)]
    for seq, record in enumerate(contents, start=1):
        log.add(seq, messages.pack(record), is_claim=record in (START, AGAIN))
    seqs = {after: [seq for seq, _ in told(log, after, 10_000)] for after in range(-1, 4)}
    everything = [1, 2, 3, 4, 5, 6, 7]
    assert seqs == {-1: everything, 0: everything[1:], 1: everything[2:], 2: [4, 7], 3: [4, 7]}


def test_vectors_are_told_from_the_first_one_on() -> None:
    """They make one answer, whatever its client has had."""
    log = TokenLogCache()
    log.add(1, messages.pack(START), is_claim=True)
    for index in range(0, 12, 4):
        log.add(2 + index, messages.pack({"type": "result", "index": index, "count": 4}))
    assert len(log.read_page(question(1, after=5, most_bytes=10_000)).records) == 4


def test_nothing_written_is_an_empty_page() -> None:
    """The claim is on its way: its reader asks the broker."""
    assert TokenLogCache().read_page(question(1)) == RecordPage([], 0)
