"""Subjects: strangers' names can never become wildcards or extra tokens."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import subjects
from streams.subjects import InvalidToken, Lane, LogAddress, PoolKey, Priority

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@given(NAMES)
def test_an_escaped_name_is_one_token_and_comes_back(name: str) -> None:
    """Model names contain dots, slashes and capitals; none may leak into the subject's grammar."""
    escaped = subjects.escape(name)
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]*", escaped)
    assert subjects.unescape(escaped) == name


@given(NAMES, NAMES)
def test_two_names_never_share_a_token(a: str, b: str) -> None:
    """Two models on one subject would answer each other's requests."""
    assert (subjects.escape(a) == subjects.escape(b)) == (a == b)


@pytest.mark.parametrize("name", ["", "A" * 342])
def test_a_name_that_fills_a_subject_is_refused(name: str) -> None:
    """The broker closes a connection that sends a line of more than 4 KB."""
    with pytest.raises(InvalidToken, match="not 1 to 1024"):
        subjects.escape(name)


@pytest.mark.parametrize("tenant", ["*", ">", "a.b", "", "A", "a b", "a" * 64, "-a", "a\n"])
def test_a_tenant_that_is_no_token_is_refused(tenant: str) -> None:
    """A tenant named `>` must not become a subscription to all."""
    with pytest.raises(InvalidToken):
        subjects.submissions(tenant)


def test_what_was_built_parses_back() -> None:
    """Builders and parsers are two halves of one grammar."""
    lane = Lane("acme", "Qwen/Qwen2.5", Priority.BATCH)
    pool = PoolKey("Qwen/Qwen2.5", "1.0", Priority.STANDARD)
    log = LogAddress("acme", "gw-1", "00ff")
    assert subjects.parse_lane(subjects.request(lane)) == lane
    assert subjects.parse_work(subjects.work(pool)) == pool
    assert subjects.parse_log(subjects.log(log, 4)) == log
    assert subjects.parse_request_id(subjects.cancel("acme", "00ff")) == ("acme", "00ff")
