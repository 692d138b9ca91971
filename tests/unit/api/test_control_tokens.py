"""Control tokens in a client's text are cut, wherever they stand; other text stays as it is."""

import json
from typing import Any

import pytest

from api.control_tokens import ControlTokens
from streams.errors import BadRequest

CONTROL = ControlTokens(["<eot>", "<start>", "ab", "bc"])


def texts_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    "value",
    [
        "a <eot> b<start><eot>",
        "<eo<eot>t>",
        "abc",
        [{"role": "user", "content": "<eot>"}],
        [{"tool_calls": [{"function": {"arguments": {"<eot>": ["<start>"]}}}]}],
        "\ue000<eot>",
    ],
)
def test_no_control_token_is_left_in_any_piece(value: Any) -> None:
    mark, safe = CONTROL.cut(value)
    pieces = texts_of(safe).split(mark)
    assert len(pieces) > 1
    assert not any(token in piece for piece in pieces for token in ("<eot>", "<start>", "ab", "bc"))
    assert "".join(pieces) == texts_of(value)


def test_text_with_every_private_character_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="private characters"):
        CONTROL.cut("".join(map(chr, range(0xE000, 0xF900))) + "<eot>")


def test_text_without_control_tokens_is_left_as_it_is() -> None:
    value = [{"role": "user", "content": "<b>x</b> < eot >"}]
    mark, safe = CONTROL.cut(value)
    assert (mark, safe is value) == ("", True)
