"""The optional parameters of requests; docs/websocket.md describes each of them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Priority = Literal["interactive", "standard", "batch"]
Inputs = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class CommonParams(TypedDict, total=False):
    """Optional parameters of every request.

    `priority` is `standard` by default. `idempotency_key` identifies the request across processes:
    if any client of the tenant sends the same content with the same key again, it gets the answer
    of the first request, which is not run twice. By default each request gets a random key.
    """

    priority: Priority
    idempotency_key: str


class GenerationParams(CommonParams, total=False):
    """Optional parameters of a generation; those left out have the gateway's defaults.

    `docs/websocket.md` says what each one means and which values it may have.
    """

    tools: Sequence[Mapping[str, Any]]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str, float]
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]
    seed: int
    stop: str | Sequence[str]
    logprobs: int
    ignore_eos: bool
