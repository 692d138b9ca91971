"""What two submissions under one idempotency key must share."""

from dataclasses import replace

from api.submission.submission_record import Submission
from streams.messages import Grammar, Sampling
from streams.subjects import Priority

GIVEN = Submission(
    "generate",
    "mock",
    Priority.STANDARD,
    None,
    prompt=[1, 2],
    sampling=Sampling(8, grammar=Grammar("regex", "a+")),
    tools=[{"type": "function", "function": {"name": "f"}}],
)


def test_the_digest_depends_on_every_part_at_any_depth() -> None:
    """A different request under the same key is a conflict, not an answer to another question."""
    others = [
        replace(GIVEN, prompt=[1, 3]),
        replace(GIVEN, sampling=Sampling(8, grammar=Grammar("regex", "b+"))),
        replace(GIVEN, tools=[{"type": "function", "function": {"name": "g"}}]),
    ]
    assert len({GIVEN.digest, *(other.digest for other in others)}) == 4


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    """A client that asks again may write its JSON in another order."""
    same = replace(GIVEN, tools=[{"function": {"name": "f"}, "type": "function"}])
    assert same.digest == GIVEN.digest
    assert len(same.digest) == 64
