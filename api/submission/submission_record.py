"""A client's request as one record, the same for HTTP, WebSocket and NATS."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

from api.schemas.classify_rerank import ClassificationBody, RerankRequest
from api.schemas.completions import OpenAIGenerationBody
from api.schemas.embeddings import EmbeddingBody
from api.schemas.fields import TokenIds
from api.schemas.generation import GenerationBody
from api.submission.json_hash import sha256_of_json
from streams.messages import RequestKind, Sampling
from streams.subjects import Priority

AnyBody = GenerationBody | EmbeddingBody | ClassificationBody | RerankRequest


@dataclass(frozen=True)
class Submission:
    """One request of a client whose body was checked and which has not been tokenised yet.

    `prompt` is text or token ids. `chat` is a list of messages, and `tools` are those that the
    answer may call; `template_options` are variables for the chat template. `inputs` are for
    `embed` and `classify`; if there is a `query`, it is paired with each of them. A
    `sampling.max_tokens` of 0 means that the client set no limit: then `default_max_tokens`, the
    endpoint's default, counts, or else the model's, or else what is left of the context, each cut
    to what the limits allow. `grammar_field` is the body's field that `sampling.grammar` came from.
    `end_user` is the client's own name of its user, which is stored as a hash alone; empty if it
    named none.
    """

    kind: RequestKind
    model: str
    priority: Priority
    deadline_ms: int | None
    prompt: str | TokenIds | None = None
    chat: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    inputs: list[str] | list[TokenIds] = field(default_factory=list)
    dimensions: int | None = None
    query: str | None = None
    choices: int = 1  # answers to the prompt
    prompts: int = 1  # prompts of the body, each a submission of its own
    grammar_field: str = "response_format"
    default_max_tokens: int | None = None
    end_user: str = ""

    @classmethod
    def from_body(cls, body: AnyBody, default_max_tokens: int | None = None) -> Self:
        """Return the submission for a checked body or frame.

        Of a body with several prompts it has the first one only; use `all_from_body` for such a
        body.
        """
        made = cls._from_body(body, default_max_tokens)
        return replace(made, end_user=body.end_user)

    @classmethod
    def _from_body(cls, body: AnyBody, default_max_tokens: int | None) -> Self:
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
            template_options=body.template_options,
            sampling=sampling,
            grammar_field=body.grammar_field,
            default_max_tokens=None if sampling.max_tokens else default_max_tokens,
        )

    @classmethod
    def all_from_body(
        cls, body: OpenAIGenerationBody, default_max_tokens: int | None
    ) -> list[Self]:
        """Return one submission for each prompt of a body, in order; a chat gives exactly one.

        Each has `choices`, the number of answers to its prompt; `split_choices` divides it into
        these.
        """
        first = replace(
            cls.from_body(body, default_max_tokens),
            choices=body.choice_count,
            prompts=len(body.prompts),
        )
        return [replace(first, prompt=prompt) for prompt in body.prompts]

    def split_choices(self) -> list[Self]:
        """Return one submission for each of the `choices` answers, in order.

        If the client set a seed, answer `i` gets the seed plus `i`, so the answers differ and can
        be reproduced.
        """
        return [self._with_choice_seed(choice) for choice in range(self.choices)]

    def _with_choice_seed(self, choice: int) -> Self:
        seed = self.sampling.seed
        if seed is None or choice == 0:
            return self
        return replace(self, sampling=replace(self.sampling, seed=seed + choice))

    def sampling_with(self, max_tokens: int, stops: list[str]) -> Sampling:
        """Return the sampling parameters with the limit `max_tokens` and with `stops` added.

        `stops` are stop strings in addition to those of the client.
        """
        return replace(self.sampling, max_tokens=max_tokens, stop=[*self.sampling.stop, *stops])

    @property
    def digest(self) -> str:
        """The SHA-256 of all fields but the end user, in hexadecimal.

        Two submissions under one idempotency key are the same request only if their digests are
        equal, also where gateways of different releases compute them: what the request leaves to
        the model's defaults counts as OpenAI's. Takes some 10 ms for 1 MB: compute it in a thread,
        where it gives way to the event loop.
        """
        fields = {name: value for name, value in vars(self).items() if name != "end_user"}
        return sha256_of_json(fields | {"sampling": self.sampling.resolve()})
