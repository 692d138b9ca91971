"""What a client asks for, whichever door it came through: HTTP, WebSocket or NATS."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from gateway.schemas.embeddings import Embedding
from gateway.schemas.fields import Tokens
from gateway.schemas.generation import Generation
from streams.messages import Kind, Sampling
from streams.subjects import Priority


@dataclass(frozen=True)
class Submission:
    """A validated request, not yet tokenised.

    `prompt` is text or token ids, `chat` messages; `inputs` are for `embed`. A
    `sampling.max_tokens` of 0 means: the default of the model and the tenant. `grammar_field` is
    where `sampling.grammar` came in.
    """

    kind: Kind
    model: str
    priority: Priority
    deadline_ms: int | None
    prompt: str | Tokens | None = None
    chat: list[dict[str, str]] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    inputs: list[str] | list[Tokens] = field(default_factory=list)
    dimensions: int | None = None
    grammar_field: str = "response_format"

    @classmethod
    def of(cls, body: Generation | Embedding, default_max_tokens: int = 0) -> Self:
        """The submission that a body or frame makes."""
        if isinstance(body, Embedding):
            return cls(
                "embed",
                body.model,
                body.lane,
                body.deadline_ms,
                inputs=body.input,
                dimensions=body.dimensions,
            )
        return cls(
            "generate",
            body.model,
            body.lane,
            body.deadline_ms,
            prompt=body.prompt,
            chat=body.chat,
            sampling=body.sampling(default_max_tokens),
            grammar_field=body.grammar_field,
        )

    def sampling_for(self, max_tokens: int, stops: list[str]) -> Sampling:
        """How to sample, with the limit that was found and further stop strings."""
        return replace(self.sampling, max_tokens=max_tokens, stop=[*self.sampling.stop, *stops])

    @property
    def digest(self) -> str:
        """What two submissions under one idempotency key must share."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
