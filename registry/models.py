"""Records of the registry: models with their versions, limits and prices; adapters and aliases."""

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from streams import messages
from streams.subjects import Priority, token
from streams.usage_accounts import Price

EngineKind = Literal["transformers", "embed", "classify", "remote", "mock"]
GenerationConfig = Literal["auto", "none"]
Task = Literal["generate", "embed", "classify"]
MAX_NAME = 128
MAX_NAME_BYTES = 256  # of UTF-8; each may take three characters in a subject
MOCK_VERSION = "1"
# Fields that a newly added version leaves as they are in the model's record, unless it sets them.
INHERITED_FIELDS = (
    "prompt_price",
    "completion_price",
    "default_max_tokens",
    "max_output_tokens",
    "generation_config",
)
BYTES_PER_TOKEN = 4  # of English text, roughly, for every tokeniser in use
_RESERVED = {
    "*": "a NATS wildcard",
    ">": "a NATS wildcard",
    "@": "what separates a model from its version",
}


def validate_name(name: str) -> str:
    """Return `name` unchanged if it is valid for a model, version or alias.

    Raises ValueError with the reason otherwise. Valid are any printable characters except spaces,
    `*`, `>` and `@`; at most 128, with at most 256 bytes of UTF-8.
    """
    if not 1 <= len(name) <= MAX_NAME:
        raise ValueError(f"the name must have 1 to {MAX_NAME} characters, it has {len(name)}")
    for character in name:
        _check_character(name, character)
    if (size := len(name.encode(errors="replace"))) > MAX_NAME_BYTES:
        raise ValueError(f"the name has {size} bytes of UTF-8, the limit is {MAX_NAME_BYTES}")
    return name


def _check_character(name: str, character: str) -> None:
    if character in _RESERVED:
        raise ValueError(f"{name!r} contains {character!r}, {_RESERVED[character]}")
    if character.isspace() or not character.isprintable():
        raise ValueError(f"{name!r} contains {character!r}: no spaces or control characters")


ModelName = Annotated[str, AfterValidator(validate_name)]


class Record(BaseModel):
    """An immutable record as stored in NATS; unknown fields of newer releases are ignored.

    Errors of validation are logged: they name fields, and quote no values.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)


class LatencyGoals(Record):
    """Latency that requests of one priority of a model should see; a goal, not a promise.

    None means that there is no goal.
    """

    time_to_first_token_ms: float | None = Field(default=None, gt=0)


class Version(Record):
    """An immutable set of a model's files.

    `options` are passed to the engine unchanged; `directory` is None for a version without files.
    """

    id: ModelName
    directory: str | None = None
    files: dict[str, str] = {}  # relative path -> sha256 in hex
    digest: str = ""  # sha256 over `files`
    options: dict[str, Any] = {}


class Model(Record):
    """A model that clients ask for by name: its task, engine, limits, prices and versions."""

    name: ModelName
    engine: EngineKind
    task: Task = "generate"
    context_length: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    embedding_dimensions: int | None = Field(default=None, gt=0)
    num_labels: int | None = Field(default=None, gt=0)
    default_max_tokens: int | None = Field(default=None, gt=0)  # None: what is left of the context
    max_output_tokens: int | None = Field(default=None, gt=0)
    versions: dict[str, Version] = Field(min_length=1)
    default_version: str
    goals: dict[Priority, LatencyGoals] = {}
    chat_template: str | None = None
    # Whether what a request does not say of sampling is as generation_config.json has it
    generation_config: GenerationConfig = "auto"
    prompt_price: float | None = Field(default=None, ge=0)  # of a million prompt tokens
    completion_price: float | None = Field(default=None, ge=0)  # of a million generated tokens
    has_tokenizer: bool = True  # False: prompts are UTF-8 bytes, and their tokens are estimated
    created: int = Field(default_factory=lambda: int(time.time()))  # epoch seconds

    @model_validator(mode="after")
    def _has_its_default(self) -> "Model":
        if self.default_version not in self.versions:
            known = ", ".join(sorted(self.versions))
            raise ValueError(f"default_version {self.default_version!r} is none of: {known}")
        return self

    @property
    def default(self) -> Version:
        """The version that serves requests that do not name a version."""
        return self.versions[self.default_version]

    @property
    def price(self) -> Price:
        """The price of each prompt and each generated token; 0 where the record has none."""
        return Price.per_million(self.prompt_price or 0.0, self.completion_price or 0.0)

    def token_count(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens of a text that was encoded as `tokens`.

        With a tokeniser, that is their number. Without one, `tokens` are the text's UTF-8 bytes,
        and the number is estimated as a quarter of them, rounded up.
        """
        return len(tokens) if self.has_tokenizer else -(-len(tokens) // BYTES_PER_TOKEN)


class Adapter(Record):
    """A LoRA adapter of one model; clients ask for it by `id`.

    Its digest takes the place of a version.
    """

    name: Annotated[str, AfterValidator(token)]
    model: ModelName
    directory: str
    files: dict[str, str]  # relative path -> sha256 in hex
    digest: str  # sha256 over `files`
    rank: int = Field(gt=0)  # the highest of its modules
    parameters: int = Field(gt=0)
    targets: list[str]  # kinds of modules, such as `q_proj`
    created: int = Field(default_factory=lambda: int(time.time()))  # epoch seconds

    @property
    def id(self) -> str:
        """The name that clients use: `model:name`."""
        return f"{self.model}:{self.name}"

    @property
    def ref(self) -> messages.AdapterRef:
        """The copy of this record that a request carries to the worker."""
        return messages.AdapterRef(
            self.name, self.digest, self.directory, self.files, self.parameters
        )


class Alias(Record):
    """Another name for a model or for one of its versions."""

    name: ModelName
    model: ModelName
    version: ModelName | None = None


class ServedModels(Record):
    """Models that running workers serve beside those of their own settings.

    `on` is a worker's id, or a type of machine, which stands for all workers of that type. Each of
    `models` is `MODEL`, `ALIAS` or `MODEL@VERSION`; without a version it follows the registry.
    """

    on: Annotated[str, AfterValidator(token)]
    models: tuple[str, ...]


def mock_model(name: str = "mock", *, context_length: int = 8192, **options: float) -> Model:
    """Return the record of a model of the mock engine, which needs no weights.

    Its tokens are UTF-8 bytes, so n ASCII letters are n tokens. It never ends by itself, so an
    answer whose request names no limit has 256 tokens.
    """
    version = Version(id=MOCK_VERSION, options=options)
    return Model(
        name=name,
        engine="mock",
        context_length=context_length,
        vocab_size=256,
        default_max_tokens=256,
        versions={version.id: version},
        default_version=version.id,
    )
