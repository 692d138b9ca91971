"""A client's request as one record, the same for HTTP, WebSocket and NATS."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any, Self

from api.schemas.classify_rerank import ClassificationBody, RerankRequest
from api.schemas.completions import OpenAIGenerationBody
from api.schemas.embeddings import EmbeddingBody
from api.schemas.fields import TokenIds
from api.schemas.generation import GenerationBody
from streams.messages import RequestKind, Sampling
from streams.subjects import Priority

AnyBody = GenerationBody | EmbeddingBody | ClassificationBody | RerankRequest


@dataclass(frozen=True)
class Submission:
    """A request whose body was checked, not yet tokenised.

    `prompt` is text or token ids; `chat` is a list of messages, with the `tools` that may be called
    in answer; `inputs` are for `embed` and `classify`, where a `query` is paired with each of them.
    A `sampling.max_tokens` of 0 means `default_max_tokens`, which is the endpoint's, or else the
    model's, or else what is left of the context, as far as limits allow. `grammar_field` names the
    field that `sampling.grammar` was in.
    """

    kind: RequestKind
    model: str
    priority: Priority
    deadline_ms: int | None
    prompt: str | TokenIds | None = None
    chat: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    inputs: list[str] | list[TokenIds] = field(default_factory=list)
    dimensions: int | None = None
    query: str | None = None
    choices: int = 1  # answers to the prompt
    prompts: int = 1  # prompts of the body, each a submission of its own
    grammar_field: str = "response_format"
    default_max_tokens: int | None = None

    @classmethod
    def from_body(cls, body: AnyBody, default_max_tokens: int | None = None) -> Self:
        """Return the submission of a body or frame; of several prompts it has the first."""
        common = (body.model, body.lane_priority, body.deadline_ms)
        if isinstance(body, EmbeddingBody):
            return cls("embed", *common, inputs=body.input, dimensions=body.dimensions)
        if isinstance(body, ClassificationBody):
            return cls("classify", *common, inputs=body.input)
        if isinstance(body, RerankRequest):
            return cls("classify", *common, inputs=body.documents, query=body.query)
        sampling = body.to_sampling()
        return cls(
            "generate",
            *common,
            prompt=body.prompt,
            chat=body.template_messages,
            tools=body.offered_tools,
            sampling=sampling,
            grammar_field=body.grammar_field,
            default_max_tokens=None if sampling.max_tokens else default_max_tokens,
        )

    @classmethod
    def all_from_body(
        cls, body: OpenAIGenerationBody, default_max_tokens: int | None
    ) -> list[Self]:
        """Return the submissions of a body, one for each prompt; a chat is one."""
        first = replace(
            cls.from_body(body, default_max_tokens),
            choices=body.choice_count,
            prompts=len(body.prompts),
        )
        return [replace(first, prompt=prompt) for prompt in body.prompts]

    def split_choices(self) -> list[Self]:
        """Return one submission for each answer.

        With a seed each answer gets a seed of its own, so that they differ and can be repeated.
        """
        return [self._with_choice_seed(choice) for choice in range(self.choices)]

    def _with_choice_seed(self, choice: int) -> Self:
        seed = self.sampling.seed
        if seed is None or choice == 0:
            return self
        return replace(self, sampling=replace(self.sampling, seed=seed + choice))

    def sampling_with(self, max_tokens: int, stops: list[str]) -> Sampling:
        """Return the sampling with the limit that was found and further stop strings."""
        return replace(self.sampling, max_tokens=max_tokens, stop=[*self.sampling.stop, *stops])

    @property
    def digest(self) -> str:
        """A SHA-256 of all fields; submissions under one idempotency key must have the same."""
        # `vars`, since `asdict` copies every token: 50 ms of the event loop for a long prompt
        whole = json.dumps(vars(self), default=vars, sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()
