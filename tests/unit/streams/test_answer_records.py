"""A durable answer is the whole end of its request."""

import pytest

from streams import messages
from streams.headers import AnswerRef
from streams.messages import Record
from streams.records.answers.answer_records import build_answer, terminal_of

USAGE = messages.openai_usage(5, 7)


@pytest.mark.parametrize(
    "terminal",
    [
        messages.done_record("stop", USAGE, {"total": 3}, "END"),
        messages.done_record("length", USAGE, {"total": 3}),
        messages.error_record("attempts_exhausted", "3 attempts failed", USAGE),
    ],
)
def test_an_answer_stands_for_its_terminal(terminal: Record) -> None:
    """With the stop string that matched, too: whoever ends the request again says the same."""
    answer = build_answer(AnswerRef("a", "d"), "r1", 9, [], terminal)
    assert terminal_of(answer) == terminal
