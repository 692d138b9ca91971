"""What waits for the log rides in few records, each small enough for the broker."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.attempt.output_buffer import MAX_CHUNK_TOKENS, OutputBuffer
from gpu_worker.engines.engine import Output
from streams.messages import Logprob, pack

OUTPUTS = st.lists(st.tuples(st.integers(1, 5), st.text(max_size=3)), max_size=300)


@given(OUTPUTS, st.integers(0, 1000), st.integers(0, 9000))
def test_records_hold_every_token_once_in_order(
    made: list[tuple[int, str]], start: int, characters: int
) -> None:
    """Chunks follow each other without a gap, whole outputs each, none over the bound."""
    pending = OutputBuffer()
    for i, (count, text) in enumerate(made):
        pending.add(Output("r", tokens=[i] * count, text=text))
    chunks = list(pending.iter_chunks(start, characters))
    assert [t for c in chunks for t in c["tokens"]] == [
        i for i, (n, _) in enumerate(made) for _ in range(n)
    ]
    assert "".join(chunk["text"] for chunk in chunks) == "".join(text for _, text in made)
    for chunk in chunks:
        assert (chunk["index"], chunk["characters"]) == (start, characters)
        assert chunk["count"] == len(chunk["tokens"]) <= MAX_CHUNK_TOKENS
        start += chunk["count"]
        characters += len(chunk["text"])


def test_a_record_full_of_logprobs_fits_the_broker() -> None:
    """After a stall much waits; one record over max_payload would stick for ever."""
    top = [(i, "alternative", -1.0) for i in range(20)]
    pending = OutputBuffer()
    for i in range(5000):
        pending.add(Output("r", tokens=[i], text="x", logprobs=[Logprob(i, "x", -0.1, top)]))
    assert max(len(pack(chunk)) for chunk in pending.iter_chunks(0, 0)) < 500_000
