"""Compares a checkpoint's tensors with those that its configuration needs, family by family."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from registry.artifact_verification import positive
from registry.checkpoints.families import FAMILIES, Family
from registry.checkpoints.findings import Finding
from registry.checkpoints.model_types import complete, read_setting
from registry.checkpoints.safetensors_header import Tensors
from registry.classifier import count_labels
from registry.models import EngineKind

CONFIG, WEIGHTS = "config.json", "*.safetensors"
Dimensions = Mapping[str, int | None]  # by the words of the tables; None: config.json does not say
Shape = tuple[int | None, ...]
_TERM = re.compile(r"(\d*)([a-z_?]+)")
# What training wrappers put before every name; no model of transformers has them.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.")
# Tensors that older releases saved, and newer ones compute: nobody misses or reads them.
_COMPUTED = re.compile(
    r"(rotary_emb\.inv_freq|position_ids|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias"
    r"|\.rotary_emb\.(cos|sin)_cached)$"
)
_SHOWN = 3  # names in a message


def check_tensors(
    config: Mapping[str, Any], engine: EngineKind, tensors: Tensors
) -> Iterator[Finding]:
    """Yield what a checkpoint lacks, has in another shape, or has too much, by its config.json.

    Of a model type whose names are not known here, only wrappers' prefixes are found.
    """
    if wrapper := _common_wrapper(tensors):
        yield Finding(WEIGHTS, _foreign_names(tensors, f"without the prefix {wrapper!r}"))
        return
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return
    expected = ExpectedTensors(family, config, engine)
    found = {expected.normalise(name): tensor for name, tensor in tensors.items()}
    if not expected.base_names & found.keys():
        example = f"by those of its type, such as {expected.full_name(min(expected.base_names))}"
        yield Finding(WEIGHTS, _foreign_names(tensors, example))
        return
    yield from _check_layers(expected, found)
    yield from _check_missing(expected, found)
    yield from _check_shapes(expected, found)
    yield from _check_surplus(expected, found)
    yield from _check_experts(expected, found)


def _common_wrapper(names: Mapping[str, object]) -> str | None:
    return next((w for w in _WRAPPERS if names and all(name.startswith(w) for name in names)), None)


def _foreign_names(names: Mapping[str, object], instead: str) -> str:
    return f"no tensor has a name of the model; {min(names)} is one: save them {instead}"


@dataclass(frozen=True)
class ExpectedTensors:
    """The tensors that a configuration needs, with shapes, by name without the base's prefix.

    A dimension that config.json does not tell is None, and fits any. `layer_count` is None where
    config.json does not say; then no layer is expected.
    """

    family: Family
    config: Mapping[str, Any]
    engine: EngineKind

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of all tensors by name; layers have their numbers."""
        shapes = {name: shape for name, shape in self._rows.items() if "*" not in name}
        layers = {name: shape for name, shape in self._rows.items() if "*" in name}
        for number in range(self.layer_count or 0):
            shapes |= {name.replace("*", str(number)): shape for name, shape in layers.items()}
        return shapes

    @cached_property
    def _rows(self) -> dict[str, Shape]:
        """The rows of the family's tables that the configuration and the engine need."""
        return _parse_table("\n".join(self._tables()), model_dimensions(self.family, self.settings))

    def get(self, key: str) -> Any:
        """Return the value of a key of config.json, by the name that most models have for it."""
        return read_key(self.family, self.settings, key)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration with its type's defaults."""
        return complete(self.config)

    @property
    def layer_count(self) -> int | None:
        """The number of layers that config.json says; None if it says none."""
        return positive(self.get("num_hidden_layers"))

    @cached_property
    def base_names(self) -> set[str]:
        """The names of the base model's tensors, without those of a head."""
        heads = (self.family.lm_head + "\n" + self.family.classifier).split()
        return self.shapes.keys() - set(heads)

    @property
    def is_tied(self) -> bool:
        """Embeddings serve as the output head, so that one of the two may be missing."""
        return self.engine == "transformers" and bool(self.get("tie_word_embeddings"))

    @cached_property
    def layer_pattern(self) -> re.Pattern[str]:
        """The beginning of the name of a layer's tensor; the group is the layer's number."""
        start = min(name for name in self._rows if "*" in name).partition("*")[0]
        return re.compile(re.escape(start) + r"(\d+)\.")

    def normalise(self, name: str) -> str:
        """Return a name as the tables have it: today's, without the base model's prefix.

        The prefix may be there twice, as in a model that another one had as its `model`.
        """
        for old, new in self.family.renamed.items():
            name = name.replace(old, new)
        prefix = self.family.prefix + "."
        return name.removeprefix(prefix).removeprefix(prefix)

    def full_name(self, name: str) -> str:
        """Return a tensor's name as a model with its head saves it."""
        is_of_base = name in self.base_names or name not in self.shapes
        return f"{self.family.prefix}.{name}" if is_of_base else name

    def _tables(self) -> Iterator[str]:
        yield self.family.tensors
        yield from (table for key, table in self.family.if_set.items() if self.get(key))
        if self.engine == "transformers":
            yield self.family.lm_head
        elif self.engine == "classify":
            yield self.family.classifier


def read_key(family: Family, settings: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key of a completed configuration under the type's name for it."""
    return read_setting(settings, family.keys.get(key, key))


def model_dimensions(family: Family, settings: Mapping[str, Any]) -> Dimensions:
    """Return what the words of the tables stand for in a completed configuration."""

    def number(key: str) -> int | None:
        return positive(read_key(family, settings, key))

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    head_dim = number("head_dim") or (hidden // heads if hidden and heads else None)
    kv_heads = number("num_key_value_heads")
    ffn_by_hidden = hidden * family.ffn_factor if hidden and family.ffn_factor else None
    return {
        "hidden": hidden,
        "vocab": number("vocab_size"),
        "ffn": number("intermediate_size") or ffn_by_hidden,
        "heads": heads,
        "head_dim": head_dim,
        "q": heads * head_dim if heads and head_dim else None,
        "kv": kv_heads * head_dim if kv_heads and head_dim else None,
        "positions": number("max_position_embeddings"),
        "types": number("type_vocab_size"),
        "experts": number("num_experts"),
        "labels": count_labels(settings),
        "?": None,
    }


def _parse_table(table: str, dimensions: Dimensions) -> dict[str, Shape]:
    lines = (line.split() for line in table.splitlines() if line.strip())
    return {name: tuple(_evaluate(word, dimensions) for word in shape) for name, *shape in lines}


def _evaluate(word: str, dimensions: Dimensions) -> int | None:
    """Return the value of a sum such as `q+2kv`; None if a part is not known."""
    total = 0
    for term in word.split("+"):
        match = _TERM.fullmatch(term)
        assert match, f"{term!r} is no term of a shape"
        value = dimensions[match[2]]
        if value is None:
            return None
        total += int(match[1] or 1) * value
    return total


def _check_layers(expected: ExpectedTensors, found: Tensors) -> Iterator[Finding]:
    """Yield layers that are wholly missing, and those beyond the number in config.json."""
    count = expected.layer_count
    if count is None:
        return
    numbers = {int(match[1]) for name in found if (match := expected.layer_pattern.match(name))}
    if absent := sorted(set(range(count)) - numbers):
        reason = f"num_hidden_layers is {count}, but {_layers(absent)} {_is(absent)} in no file"
        yield Finding(CONFIG, reason + "; fetch the whole checkpoint, or its own config.json")
    if beyond := sorted(numbers - set(range(count))):
        reason = f"num_hidden_layers is {count}, but the files have {_layers(beyond)}, too"
        yield Finding(CONFIG, reason + "; it is of another checkpoint, or was changed")


def _check_missing(expected: ExpectedTensors, found: Tensors) -> Iterator[Finding]:
    """Yield tensors that are in no file, outside of layers that are wholly missing."""
    present = {m[0] for name in found if (m := expected.layer_pattern.match(name))}
    missing = []
    for name in expected.shapes.keys() - found.keys():
        layer = expected.layer_pattern.match(name)
        if layer is None or layer[0] in present:
            missing.append(name)
    head, embeddings = "lm_head.weight", _embeddings_name(expected)
    if expected.is_tied and {head, embeddings} & found.keys():
        missing = [name for name in missing if name not in (head, embeddings)]
    elif head in missing:
        missing.remove(head)
        reason = "lm_head.weight is in no file, and tie_word_embeddings is false; set it in "
        yield Finding(WEIGHTS, reason + f"{CONFIG} if the head is the embeddings, or fetch it")
    if missing:
        names = sorted(map(expected.full_name, missing))
        reason = f"{_shown(names)} {_is(names)} in no file, which {expected.config['model_type']}"
        yield Finding(WEIGHTS, reason + " needs; fetch the whole checkpoint")


def _embeddings_name(expected: ExpectedTensors) -> str:
    """Return the name of the token embeddings: the first row of every table."""
    return expected.family.tensors.split()[0]


def _check_shapes(expected: ExpectedTensors, found: Tensors) -> Iterator[Finding]:
    wrong = {
        name: (found[name].shape, shape)
        for name, shape in sorted(expected.shapes.items())
        if name in found and not _fits(found[name].shape, shape)
    }
    if wrong:
        name, (is_, should) = next(iter(wrong.items()))
        more = f" (and {len(wrong) - 1} more so)" if len(wrong) > 1 else ""
        reason = f"{expected.full_name(name)} has the shape {list(is_)}, {CONFIG} asks for "
        yield Finding(
            found[name].path.name,
            f"{reason}{_show_shape(should)}{more}; the two are of different models",
        )


def _fits(shape: tuple[int, ...], expected: Shape) -> bool:
    return len(shape) == len(expected) and all(
        b is None or a == b for a, b in zip(shape, expected, strict=True)
    )


def _check_surplus(expected: ExpectedTensors, found: Tensors) -> Iterator[Finding]:
    """Yield biases and norms of the layers that the model would drop, unless they are all zero."""
    surplus = []
    for name in sorted(found.keys() - expected.shapes.keys()):
        layer = expected.layer_pattern.match(name)
        known = layer and expected.layer_count and int(layer[1]) < expected.layer_count
        is_weight = name.endswith((".bias", "norm.weight")) and not _COMPUTED.search(name)
        if known and is_weight and found[name].read_bytes().strip(b"\0"):
            surplus.append(expected.full_name(name))
    if surplus:
        reason = f"{_shown(surplus)} {_is(surplus)} no part of a {expected.config['model_type']}"
        yield Finding(
            WEIGHTS, f"{reason} with this {CONFIG}, and would be left out; it is of another model"
        )


_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<number>\d+)\.(?P<part>.+)")


_ROUTER = ".gate.weight"


def _check_experts(expected: ExpectedTensors, found: Tensors) -> Iterator[Finding]:
    """Yield a layer with a router and no experts, and what is missing of experts one by one."""
    for layer in sorted(name.removesuffix(_ROUTER) for name in found if name.endswith(_ROUTER)):
        if not any(name.startswith(f"{layer}.experts.") for name in found):
            reason = f"{expected.full_name(layer)} has a router and no experts; fetch the whole"
            yield Finding(WEIGHTS, f"{reason} checkpoint")
            return
    yield from _check_expert_numbers(expected, found)


def _check_expert_numbers(expected: ExpectedTensors, found: Tensors) -> Iterator[Finding]:
    """Yield an expert that is missing or too much, of layers which have experts one by one."""
    matches = [match for name in found if (match := _EXPERT.fullmatch(name))]
    count = positive(expected.get("num_experts"))
    if not matches or count is None:
        return
    numbers = {(match["layer"], match["part"]): set[int]() for match in matches}
    for match in matches:
        numbers[match["layer"], match["part"]].add(int(match["number"]))
    for (layer, part), found_numbers in sorted(numbers.items()):
        if wrong := found_numbers ^ set(range(count)):
            reason = f"{expected.full_name(layer)}.{min(wrong)}.{part} "
            state = "is too much" if min(wrong) >= count else "is in no file"
            yield Finding(WEIGHTS, f"{reason}{state}: {CONFIG} says {count} experts")
            return


def _layers(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    return f"layers {', '.join(map(str, numbers[:10]))}{', …' if len(numbers) > 10 else ''}"


def _is(things: list[Any]) -> str:
    return "is" if len(things) == 1 else "are"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _show_shape(shape: Shape) -> str:
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"
