"""Bytes of an answer are bounded by what its line asks for."""

from typing import Any

import pytest

from api.batches.batch_line import BatchLine
from api.batches.input_estimate import (
    LOGPROB_BYTES,
    TOKEN_BYTES,
    InputEstimate,
    ModelShare,
    answer_bytes,
    count_prompt_tokens,
)
from registry.models import mock_model
from streams.errors import BadRequest
from streams.usage_accounts import Price

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "for_each_token"),
    [
        ({}, TOKEN_BYTES),
        ({"logprobs": False, "top_logprobs": 5}, TOKEN_BYTES),
        ({"logprobs": True}, TOKEN_BYTES + 2 * LOGPROB_BYTES),
        ({"logprobs": True, "top_logprobs": 5}, TOKEN_BYTES + 6 * LOGPROB_BYTES),
        ({"logprobs": 3}, TOKEN_BYTES + 4 * LOGPROB_BYTES),
        ({"logprobs": "many"}, TOKEN_BYTES + LOGPROB_BYTES),
    ],
)
def test_log_probabilities_take_more_than_text(body: dict[str, Any], for_each_token: int) -> None:
    """Log probabilities are counted in any form in which an endpoint takes them."""
    line = BatchLine("x", CHAT, body)
    assert answer_bytes(line, mock_model("mock"), 10) == 10 * for_each_token


async def test_prompts_are_scaled_from_the_lines_that_were_counted() -> None:
    """By bytes; a line that is refused is left out."""
    lines = [BatchLine(str(i), CHAT, {}) for i in range(3)]

    async def count(line: BatchLine) -> int:
        if line.custom_id == "1":
            raise BadRequest("no")
        return 20

    share = ModelShare(Price(), lines=30, bytes=3000)
    found = InputEstimate(lines=30, models={"m": share}, sample=[(line, 100) for line in lines])
    assert await count_prompt_tokens(found, count) == (600, 2)
    nothing = InputEstimate(lines=1)
    assert await count_prompt_tokens(nothing, count) == (0, 0)
