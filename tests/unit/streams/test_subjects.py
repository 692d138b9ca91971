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
    try:
        escaped = subjects.escape(name)
    except InvalidToken:
        assert len(name.encode()) * 3 + 3 > 63  # too long is the only reason
        return
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", escaped)
    assert subjects.unescape(escaped) == name


@given(NAMES, NAMES)
def test_two_names_never_share_a_token(a: str, b: str) -> None:
    """Two models on one subject would answer each other's requests."""
    try:
        assert (subjects.escape(a) == subjects.escape(b)) == (a == b)
    except InvalidToken:
        return


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
