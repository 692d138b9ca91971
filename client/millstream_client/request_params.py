"""What may be asked of a generation beside its prompt; docs/websocket.md tells what each means."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Priority = Literal["interactive", "standard", "batch"]
Inputs = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class CommonParams(TypedDict, total=False):
    """What may be said of any request.

    `idempotency_key` names the request beyond this process: sent again, by whomever, it is the same
    one. Without it each request has a key of its own.
    """

    priority: Priority
    idempotency_key: str


class GenerationParams(CommonParams, total=False):
    """How to choose tokens, and when to stop. What is left out is the gateway's default."""

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
