"""Records of the registry: models with their versions, limits and prices; adapters and aliases."""

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from streams import messages
from streams.subjects import Priority, token
from streams.usage_accounts import Price

EngineKind = Literal["transformers", "embed", "classify", "remote", "mock"]
GenerationConfig = Literal["auto", "none"]
Task = Literal["generate", "embed", "classify"]
MAX_NAME = 128
MAX_EARLIER = 20  # targets that an alias keeps
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
# What follows from a version's files
FILE_FACTS = (
    "context_length",
    "vocab_size",
    "embedding_dimensions",
    "num_labels",
    "chat_template",
    "has_tokenizer",
)
BYTES_PER_TOKEN = 4  # of English text, roughly, for every tokeniser in use
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_NO_TOKENS = {"config.json", "generation_config.json"}
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
    """An immutable set of a model's files, with all that follows from them.

    `options` are passed to the engine unchanged; `directory` is None for a version without files.
    """

    id: ModelName
    directory: str | None = None
    files: dict[str, str] = {}  # relative path -> sha256 in hex
    digest: str = ""  # sha256 over `files`
    options: dict[str, Any] = {}
    context_length: int = Field(gt=0)  # tokens of prompt and output together
    vocab_size: int = Field(gt=0)
    embedding_dimensions: int | None = Field(default=None, gt=0)
    num_labels: int | None = Field(default=None, gt=0)
    chat_template: str | None = None
    has_tokenizer: bool = True  # False: prompts are UTF-8 bytes, and their tokens are estimated

    def takes_prompts_of(self, other: "Version") -> bool:
        """Return True if a request that was tokenised for `other` is right for this version, too.

        That is so with the same vocabulary, template and files but for weights and the two that do
        not bear on tokens, and a context that is no shorter.
        """
        return self._encoding == other._encoding and self.context_length >= other.context_length

    @property
    def _encoding(self) -> tuple[Any, ...]:
        files = {
            path: sha256
            for path, sha256 in self.files.items()
            if not path.endswith(_WEIGHTS) and path not in _NO_TOKENS
        }
        return self.vocab_size, self.chat_template, self.has_tokenizer, files

    def token_count(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens of a text that was encoded as `tokens`.

        With a tokeniser, that is their number. Without one, `tokens` are the text's UTF-8 bytes,
        and the number is estimated as a quarter of them, rounded up.
        """
        return len(tokens) if self.has_tokenizer else -(-len(tokens) // BYTES_PER_TOKEN)


class Model(Record):
    """A model that clients ask for by name: its task, engine, limits, prices and versions."""

    name: ModelName
    engine: EngineKind
    task: Task = "generate"
    default_max_tokens: int | None = Field(default=None, gt=0)  # None: what is left of the context
    max_output_tokens: int | None = Field(default=None, gt=0)
    versions: dict[str, Version] = Field(min_length=1)
    default_version: str
    goals: dict[Priority, LatencyGoals] = {}
    # Whether what a request does not say of sampling is as generation_config.json has it
    generation_config: GenerationConfig = "auto"
    prompt_price: float | None = Field(default=None, ge=0)  # of a million prompt tokens
    completion_price: float | None = Field(default=None, ge=0)  # of a million generated tokens
    created: int = Field(default_factory=lambda: int(time.time()))  # epoch seconds

    @model_validator(mode="before")
    @classmethod
    def _complete_versions(cls, data: Any) -> Any:
        """Give each version of a record what older releases stored with the model alone."""
        if not isinstance(data, dict) or not isinstance(data.get("versions"), dict):
            return data
        facts = {name: data[name] for name in FILE_FACTS if name in data}
        versions = {
            name: {**facts, **each} if isinstance(each, dict) else each
            for name, each in data["versions"].items()
        }
        return {**data, "versions": versions}

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Tell what follows from the default version's files with the model, too.

        Services of older releases look for it there, and so do people.
        """
        found: dict[str, Any] = dump(self)
        default = found.get("versions", {}).get(self.default_version, {})
        return found | {name: default[name] for name in FILE_FACTS if name in default}

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

    def find_version(self, version_id: str) -> Version:
        """Return the version with this id; the default one if there is none, or no longer."""
        return self.versions.get(version_id, self.default)

    @property
    def price(self) -> Price:
        """The price of each prompt and each generated token; 0 where the record has none."""
        return Price.per_million(self.prompt_price or 0.0, self.completion_price or 0.0)


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


class AliasTarget(Record):
    """The target of an alias: a model, or one of its versions."""

    model: ModelName
    version: ModelName | None = None

    def __str__(self) -> str:
        """Return `model`, or `model@version`."""
        return f"{self.model}@{self.version}" if self.version else self.model


class Alias(AliasTarget):
    """Another name for a model or for one of its versions.

    `earlier` is what it meant before, the latest last: that to which it can go back.
    """

    name: ModelName
    earlier: list[AliasTarget] = []

    @property
    def target(self) -> AliasTarget:
        """The target of the alias now."""
        return AliasTarget(model=self.model, version=self.version)

    def moved(self, target: AliasTarget) -> "Alias":
        """Return the alias as it means `target`, and can go back to what it means now."""
        if target == self.target:
            return self
        earlier = [*self.earlier, self.target][-MAX_EARLIER:]
        return Alias(name=self.name, earlier=earlier, **target.model_dump())

    def moved_back(self) -> "Alias":
        """Return the alias as it means what it meant before; it must have meant something."""
        *earlier, last = self.earlier
        return Alias(name=self.name, earlier=earlier, **last.model_dump())


class Target(NamedTuple):
    """Model, version and adapter that a request asks for; `adapter` None: the plain model."""

    model: Model
    version: Version
    adapter: Adapter | None = None


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
    version = Version(
        id=MOCK_VERSION, options=options, context_length=context_length, vocab_size=256
    )
    return Model(
        name=name,
        engine="mock",
        default_max_tokens=256,
        versions={version.id: version},
        default_version=version.id,
    )
