"""Digests of submissions: equal for two that one idempotency key may stand for."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.submission import json_hash
from api.submission.json_hash import sha256_of_json
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


def test_the_digest_is_the_same_in_every_release() -> None:
    """While gateways are replaced one by one, a client's second try may reach an older one."""
    assert GIVEN.digest == "a0792d604f8527e97125588664f57d454755051daf5005160e8f7fc2b6ff306c"
    long = replace(GIVEN, prompt='\U0001f600 und "so" weiter\n' * 10_000)
    known = {name: value for name, value in vars(long).items() if name != "end_user"}
    assert long.digest == plain_digest(known | {"sampling": long.sampling.resolve()})
    assert replace(long, end_user="u").digest == long.digest


def plain_digest(value: object) -> str:
    whole = json.dumps(value, default=vars, sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


TEXTS = st.text(st.characters(), max_size=40)  # lone surrogates, too
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(
    SCALARS | st.lists(st.integers(0, 300_000), max_size=40),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=6),
    max_leaves=40,
)


@given(VALUES, st.integers(2, 60), st.integers(1, 9))
def test_the_hash_is_that_of_the_whole_json(value: Any, piece: int, numbers: int) -> None:
    """Wherever it is cut: within a text, within a list, between the halves of a character."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_hash, "PIECE", piece)
        patch.setattr(json_hash, "NUMBERS", numbers)
        sampling = Sampling(8, stop=["a"], grammar=Grammar("regex", "a+" * piece))
        for each in (value, {"value": value, "sampling": sampling}):
            assert sha256_of_json(each) == plain_digest(each)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 1_000_000,
        "\U0001f600" * 250_000,
        list(range(200_000)),
        [{"role": "user", "content": "x" * 1000}] * 1000,
        [{"a": ["b"]}] * 20_000,
        [list(range(150))] * 1000,
        {f"key {number}": number for number in range(50_000)},
    ],
    ids=["text", "emoji", "tokens", "chat", "small parts", "inputs", "keys"],
)
def test_no_piece_is_large(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one call that holds Python's lock, and so the event loop, to its end."""
    sizes, encode = list[int](), json_hash._encode

    def measured(part: object) -> str:
        sizes.append(len(text := encode(part)))
        return text

    monkeypatch.setattr(json_hash, "_encode", measured)
    assert sha256_of_json(value) == plain_digest(value)
    assert max(sizes) <= 12 * json_hash.PIECE + 2  # a character beyond the BMP has 12
