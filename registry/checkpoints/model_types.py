"""Tables of transformers' model types: their classes, and what config.json may leave out.

`model_types.json` is written by `python -m tests.engine.model_types` from the transformers in
`constraints.txt`, since the registry has none. `refused_architectures.json` has what only a worker
can tell of a class; `make sweep` writes it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from registry.artifact_verification import ArtifactRefused
from registry.models import EngineKind

FILE = Path(__file__).with_name("model_types.json")
REFUSED_FILE = Path(__file__).with_name("refused_architectures.json")
CONFIG = "config.json"
SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
REMOTE = "serve it with vLLM and register that server (--remote)"
CLASSIFIES = "ForSequenceClassification"
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_HEADS = ("LMHeadModel", "DoubleHeadsModel")  # of classes that are no base model

# Keys of config.json whose defaults are in the table
KEYS = (
    "vocab_size", "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length",
    "n_ctx", "max_seq_len", "hidden_size", "dim", "d_model", "n_embd", "intermediate_size",
    "n_inner", "hidden_dim", "num_hidden_layers", "n_layer", "n_layers", "num_layers",
    "num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads", "head_dim",
    "d_kv", "type_vocab_size", "num_experts", "num_local_experts", "sliding_window",
    "sliding_window_pattern", "pad_token_id", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "is_encoder_decoder", "attn_logit_softcapping", "kv_lora_rank", "use_bidirectional_attention",
    "num_kv_shared_layers", "state_size", "ssm_cfg",
)  # fmt: skip


@dataclass(frozen=True)
class ModelType:
    """One `model_type` of transformers.

    `generates` is the class of its causal language model, None if it has none. `defaults` are the
    values of keys that config.json leaves out, and `names` leads from other names of keys to the
    type's own. `text` has the key of the part that describes the text model, and that part's type.
    With `encodes` its encoder can be loaded without its decoder. `tokenizer` is the class of its
    tokeniser.
    """

    architectures: list[str] = field(default_factory=list)
    generates: str | None = None
    classifies: bool = False
    embeds: bool = False
    encodes: bool = False
    tokenizer: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    text: tuple[str, str] | None = None


_UNKNOWN = ModelType()
GetSetting = Callable[[str], Any]  # the value of a key of a configuration; None if it has none


@cache
def read_types() -> dict[str, ModelType]:
    """Return all model types of transformers by name."""
    types = json.loads(FILE.read_text())["types"]
    return {name: ModelType(**entry) for name, entry in types.items()}


@cache
def read_refused() -> dict[str, str]:
    """Return why architectures cannot run, by the name of their class, as `make sweep` found it."""
    found: dict[str, str] = json.loads(REFUSED_FILE.read_text())["architectures"]
    return found


def names_generator(config: Mapping[str, Any], architecture: str) -> bool:
    """Return whether an architecture is a causal language model, by its name or its type's entry.

    The name may be one that transformers does not have.
    """
    return architecture.endswith(_GENERATES) or architecture == _find(config).generates


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the defaults of its type, under the type's own names of keys.

    One of an unknown type is returned as it is.
    """
    kind = _find(config)
    return {**kind.defaults, **{kind.names.get(key, key): config[key] for key in config}}


def read_setting(settings: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key in a completed configuration; None without one.

    The key may be another name of the type's own, such as `hidden_size` of GPT-2's `n_embd`.
    """
    return settings.get(_find(settings).names.get(key, key))


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the completed part of a configuration that describes the text model.

    It is the whole where no part is for the text. Raises `ArtifactRefused` if that part is no
    object.
    """
    key, part_type = _find(config).text or ("text_config", None)
    part = config.get(key)
    if part is None:  # older files have its keys at the top
        own = {} if part_type is None else {"model_type": part_type}
        return complete({**config, **own})
    if not isinstance(part, dict):
        raise ArtifactRefused(CONFIG, f"{key} is {part!r}, not an object")
    return complete({"model_type": part_type, **part} if part_type else part)


def check_architecture(config: Mapping[str, Any], engine: EngineKind) -> None:
    """Raise `ArtifactRefused` if the engine cannot run a configuration's type or architecture.

    Only what config.json and the tables tell is refused: a worker may still refuse a model.
    """
    reasons = chain(declared_reasons(config, engine), _refused_classes(config, engine))
    if reason := next(reasons, None):
        raise ArtifactRefused(CONFIG, reason)


def declared_reasons(config: Mapping[str, Any], engine: EngineKind) -> Iterator[str]:
    """Yield why an engine cannot run a configuration, by what this and its type's entry say."""
    name = config.get("model_type")
    if not isinstance(name, str):
        yield f"has the model_type {name!r}: write the type's name into it"
    elif kind := read_types().get(name):
        yield from _quoted_numbers(config)
        yield from (f"{reason}; {REMOTE}" for reason in _type_reasons(config, kind, engine))
    else:
        own_code = ", and code that comes with a model is not run" * ("auto_map" in config)
        reason = f"model_type {name!r} is none of the {len(read_types())} types that transformers "
        yield f"{reason}{_version()} has{own_code}; {REMOTE}"


def unsupported_features(get: GetSetting) -> Iterator[str]:
    """Yield the features of a configuration, or of its text part, that paged attention cannot run.

    `get` returns the value of one of its keys.
    """
    layers = get("layer_types")
    kinds = {str(each) for each in layers} if isinstance(layers, list | tuple) else set()
    unsupported = sorted(kinds - SUPPORTED_LAYER_TYPES)
    features = {
        "an encoder and a decoder": get("is_encoder_decoder"),
        "soft-capped attention": get("attn_logit_softcapping"),
        "multi-head latent attention": get("kv_lora_rank"),
        "bidirectional attention": get("use_bidirectional_attention"),
        "KV shared between layers": get("num_kv_shared_layers"),
        f"layers of type {', '.join(unsupported)}": unsupported,
        "rotary embeddings that depend on the longest sequence of a batch": _has_longrope(get),
        "state-space layers": get("state_size") or get("ssm_cfg"),
    }
    yield from (feature for feature, is_there in features.items() if is_there)


def _has_longrope(get: GetSetting) -> bool:
    """Return whether rotary frequencies depend on the largest position, in any type of layer."""
    outer = [
        each for key in ("rope_parameters", "rope_scaling") if isinstance(each := get(key), dict)
    ]
    inner = [part for each in outer for part in each.values() if isinstance(part, dict)]
    kinds = {str(each.get(key)) for each in (*outer, *inner) for key in ("rope_type", "type")}
    return "longrope" in kinds


def _quoted_numbers(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys of a configuration, or of its text part, with a text instead of a number."""
    key, _ = _find(config).text or ("text_config", None)
    parts = (config, config.get(key))
    for part in (each for each in parts if isinstance(each, dict)):
        kind = _find(part)
        for name, value in part.items():
            default = kind.defaults.get(kind.names.get(name, name))
            if isinstance(value, str) and isinstance(default, int):
                yield f"has {name} {value!r}: write the number without quotes"


def _find(config: Mapping[str, Any]) -> ModelType:
    name = config.get("model_type")
    return read_types().get(name, _UNKNOWN) if isinstance(name, str) else _UNKNOWN


def _version() -> str:
    return str(json.loads(FILE.read_text())["transformers"])


def _type_reasons(config: Mapping[str, Any], kind: ModelType, engine: EngineKind) -> Iterator[str]:
    """Yield why an engine cannot run a configuration of a known type."""
    name = config["model_type"]
    has_decoder = kind.defaults.get("is_encoder_decoder") or config.get("is_encoder_decoder")
    if engine == "transformers":
        yield from _generating_reasons(config, kind)
    elif engine == "classify":
        if not kind.classifies:
            yield f"transformers has no sequence classifier of the type {name!r}"
        if has_decoder:
            yield f"a classifier of the type {name!r} has an encoder and a decoder"
    elif not kind.embeds:
        yield f"transformers has no base model of the type {name!r}"
    elif has_decoder and not kind.encodes:
        yield f"a sentence encoder of the type {name!r} has a decoder, too"


def _generating_reasons(config: Mapping[str, Any], kind: ModelType) -> Iterator[str]:
    name = config["model_type"]
    if kind.generates is None:
        yield f"transformers has no causal language model for its type {name!r}"
        return
    known = {each for entry in read_types().values() for each in entry.architectures}
    if foreign := [a for a in config.get("architectures") or [] if a not in known]:
        own = f"{name!r} has {kind.generates}: write that, if the model is one"
        yield f"architectures names {foreign[0]}, which transformers does not have; {own}"
    for settings in (complete(config), text_settings(config)):
        features = unsupported_features(settings.get)
        yield from (f"{kind.generates} cannot run on this engine: it has {x}" for x in features)


def classes_run(config: Mapping[str, Any], engine: EngineKind) -> Iterator[str]:
    """Yield the names of the classes that an engine may run for a configuration."""
    kind = _find(config)
    endings = {"embed": ("Model",), "classify": ("Model", CLASSIFIES)}.get(engine, ())
    found = (each for each in kind.architectures if each.endswith(endings))
    yield from (each for each in found if not each.endswith(_HEADS))
    if engine == "transformers" and kind.generates:
        yield kind.generates


def _refused_classes(config: Mapping[str, Any], engine: EngineKind) -> Iterator[str]:
    """Yield why workers refuse the classes that the engine would run, of all configurations."""
    for name in classes_run(config, engine):
        if reason := read_refused().get(name):
            yield f"{name} cannot run on this engine: {reason}; {REMOTE}"
