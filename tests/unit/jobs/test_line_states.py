"""Lines of a batch end once, in whatever order, and the watermark passes no open one."""

from hypothesis import given
from hypothesis import strategies as st

from api.batches.batch_line import BatchLine, InputLine
from jobs.batches.line_states import MAX_TRIES, LineStates

LINE = BatchLine("id", "/v1/embeddings", {})


def source(index: int) -> InputLine:
    return InputLine(index, index * 10, index * 10 + 10, b"x")


def states(count: int, tries: dict[str, tuple[int, int]] | None = None) -> LineStates:
    """All lines of an input of `count` lines, read and due."""
    made = LineStates(0, 0, tries or {})
    for index in range(count):
        made.add(source(index), LINE)
    return made


@given(st.permutations(range(8)), st.integers(0, 8))
def test_the_watermark_follows_the_first_open_line(order: list[int], ended: int) -> None:
    """Whatever order they end in; a second end of a line changes nothing."""
    made = states(8)
    for index in order[:ended]:
        assert made.mark_ended(index)
        assert not made.mark_ended(index)
    still_open = set(range(8)) - set(order[:ended])
    assert made.watermark == min(still_open, default=8)
    assert made.offset == made.watermark * 10
    assert (len(made), made.bytes) == (len(still_open), 10 * len(still_open))
    assert [state.source.index for state in made.iterate_due(0)] == sorted(still_open)


def test_a_line_that_had_ended_before_it_was_read_is_not_due() -> None:
    """Another process has published it, and this one has read its result first."""
    made = LineStates(0, 0, {})
    made.mark_ended(1)
    made.add(source(0), LINE)
    made.add(source(1), LINE)
    assert [state.source.index for state in made.iterate_due(0)] == [0]
    made.mark_ended(0)
    assert made.watermark == 2


def test_a_published_line_is_due_again_only_when_it_must_have_ended() -> None:
    """Its request has a deadline: after that nothing comes any more."""
    made = states(1)
    made.mark_published(0, overdue=100.0)
    made.retry_overdue(99.0)
    assert list(made.iterate_due(99.0)) == []
    made.retry_overdue(100.0)
    (state,) = made.iterate_due(100.0)
    assert state.attempt == 1


def test_all_published_lines_are_due_again_when_their_queue_was_lost() -> None:
    """As the same tries; what waits for its time, or has ended, stays as it is."""
    made = states(4)
    for index in range(3):
        made.mark_published(index, overdue=100.0)
    made.mark_ended(2)
    made.delay(3, due=50.0)
    assert made.retry_all(10.0) == 2
    assert [(each.source.index, each.attempt) for each in made.iterate_due(10.0)] == [
        (0, 1),
        (1, 1),
    ]


def test_tries_that_a_worker_had_begun_pause_and_are_counted() -> None:
    """The last one says so; a deadline that passed in the queue is no try, and has no pause."""
    made = states(1)
    (state,) = made.iterate_due(0)
    assert not state.is_last
    assert made.mark_failed(0, 1, 0.0, had_begun=False)
    assert [each.attempt for each in made.iterate_due(0)] == [2]
    for number in range(1, MAX_TRIES):
        now = number * 1000.0
        (state,) = made.iterate_due(now)
        assert (state.attempt, state.is_last) == (number + 1, False)
        assert made.mark_failed(0, number + 1, now, had_begun=True)
        assert list(made.iterate_due(now)) == []
    (state,) = made.iterate_due(1e9)
    assert state.is_last


def test_a_late_word_of_an_earlier_try_changes_nothing() -> None:
    """Its message may come twice."""
    made = states(1)
    assert made.mark_failed(0, 1, 0.0, had_begun=True)
    assert not made.mark_failed(0, 1, 0.0, had_begun=True)
    assert not made.mark_failed(7, 1, 0.0, had_begun=True)


def test_tries_are_known_to_the_next_process() -> None:
    """Else it would publish a try that has failed already."""
    before = states(3)
    before.mark_failed(1, 1, 0.0, had_begun=True)
    assert before.tries == {"1": (2, 1)}
    after = states(3, before.tries)
    assert [(state.attempt, state.begun) for state in after.iterate_due(0)] == [
        (1, 0),
        (2, 1),
        (1, 0),
    ]
