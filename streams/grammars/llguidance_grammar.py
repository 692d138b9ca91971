"""Grammars of requests: translates a `Grammar` into llguidance's form and enforces limits on it.

The gateway checks a grammar here before it queues the request; the worker compiles the translation.
A client's grammar must not hang either of them or use up their memory. llguidance bounds most of
that itself (size, nesting, states, work per token); the cases that it was seen not to bound are
refused here. Pure.
"""

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from math import lcm
from typing import Any, Literal

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from streams.errors import BadGrammar
from streams.grammars.regex_repetition import count_repeated
from streams.messages import Grammar

MAX_CHARACTERS = 65_536
MAX_REMAINDERS = 10_000  # `multipleOf` compiles to one state each: 25 ms; 8 s at 1,000,000
MAX_REPEATED = 10_000  # copies that exact counts make: 10 ms for one token's mask; 1 s at 1,000,000
WHITESPACE = r"[ \t\r\n]{1,32}"  # between JSON tokens; unbounded, some models emit it for ever
LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,  # for one token's mask: some 7 ms
    max_lexer_states=50_000,  # some 100 MB
    verbose_errors=False,
)
_NOTHING_ALLOWED = "NoExtensionBias"  # llguidance's word for a state without a way on
_ANY_OBJECT = '{"type":"object"}'
# The values of `format` that llguidance enforces; all others are annotations, as JSON Schema has it
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_SCHEMA_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_VALUES = frozenset({"const", "enum", "default", "example", "examples"})  # hold no schemas


def to_llguidance(grammar: Grammar) -> str:
    """Return a grammar translated into the form that llguidance, the compiler of grammars, reads.

    Raises `BadGrammar` if the grammar is over a size limit or is a JSON schema that llguidance
    cannot read. A regular expression is not checked here; `check_grammar` does that.
    """
    if len(grammar.source) > MAX_CHARACTERS:
        size = len(grammar.source)
        raise BadGrammar(f"a grammar of {size} characters is over the limit of {MAX_CHARACTERS}")
    if grammar.kind == "regex":
        _check_repetition([grammar.source])
        return LLMatcher.grammar_from_regex(grammar.source)
    source = grammar.source if grammar.kind == "json_schema" else _ANY_OBJECT
    schema = _parse_json(source)
    _check_multiples(schema)
    _check_repetition(list(_find_patterns(schema)), _longest_start(schema))
    try:
        return LLMatcher.grammar_from_json_schema(
            _without_annotations(schema), overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError as error:
        raise grammar_error(grammar.kind, str(error)) from None


def check_grammar(grammar: Grammar) -> None:
    """Raise `BadGrammar` with the reason if the grammar cannot be compiled, or allows no output.

    Blocks for about 1 ms, some 100 ms at worst.
    """
    source = to_llguidance(grammar)
    failed, messages = LLMatcher.validate_grammar_with_warnings(source, limits=LIMITS)
    if failed:
        raise grammar_error(grammar.kind, messages[0])
    matcher = LLMatcher(_byte_tokenizer(), source, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()
    if matcher.is_error():
        reason = matcher.get_error()
        nothing = reason.startswith(_NOTHING_ALLOWED)
        raise grammar_error(grammar.kind, "no output can follow it" if nothing else reason)


@cache
def _byte_tokenizer() -> LLTokenizer:
    """A tokeniser whose tokens are bytes: what these allow as a start, any model's tokens do."""
    return LLTokenizer("byte")


def grammar_error(kind: Literal["json_object", "json_schema", "regex"], reason: str) -> BadGrammar:
    """Return a `BadGrammar` with the compiler's reason, without the source that the reason quotes.

    At most 200 characters of the reason are kept.
    """
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    shown = next((line for line in lines if line.startswith("error: ")), lines[0])
    return BadGrammar(f"the {kind} cannot be used: {shown.removeprefix('error: ')[:200]}")


def _parse_json(source: str) -> Any:
    try:
        return orjson.loads(source)
    except ValueError as error:
        raise BadGrammar(f"the JSON schema is not JSON: {error}") from None


def _without_annotations(schema: Any) -> str:
    """Return the schema without what llguidance refuses to read, or reads as settings of its own.

    A `format` that it does not know is an annotation; `x-guidance` could undo our limits.
    """
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            node.pop("x-guidance", None)
            if "format" in node and node["format"] not in _FORMATS:
                del node["format"]
            for name, value in node.items():
                if name in _SCHEMA_MAPS and isinstance(value, dict):
                    nodes += value.values()
                elif name not in _VALUES:
                    nodes.append(value)
    return orjson.dumps(schema).decode()


def _check_repetition(patterns: list[str], start: int = 0) -> None:
    """Raise `BadGrammar` if exact counts, such as in `(x{100}){100}`, make too many copies.

    The lexer builds every copy to find out what may come next. `start`: further ones.
    """
    if start + sum(map(count_repeated, patterns)) > MAX_REPEATED:
        raise BadGrammar(
            f"the grammar's repetitions multiply to more than {MAX_REPEATED} copies; "
            "use smaller counts, or an open one such as x*"
        )


def _find_patterns(schema: Any) -> Iterator[str]:
    """Yield every regular expression in the schema."""
    for node in _objects(schema):
        if isinstance(node.get("pattern"), str):
            yield node["pattern"]
        if isinstance(node.get("patternProperties"), dict):
            yield from node["patternProperties"]


def _longest_start(schema: Any) -> int:
    """The highest `minLength` that comes with a pattern, which makes a copy of it each; 0: none."""
    lengths = (node.get("minLength") for node in _objects(schema) if "pattern" in node)
    return max((int(each) for each in lengths if isinstance(each, int | float)), default=0)


def _check_multiples(schema: Any) -> None:
    """Raise `BadGrammar` if the schema's `multipleOf` would compile to too many lexer states.

    The lexer has one state for each remainder by the least common multiple of all divisors.
    """
    numerator, denominator = 1, 1
    for number in _find_multiples(schema):
        divisor = Fraction(str(number))
        numerator = lcm(numerator, divisor.numerator)
        denominator = lcm(denominator, divisor.denominator)
        if numerator * denominator > MAX_REMAINDERS:
            raise BadGrammar(f"the schema's multipleOf, up to {number}, make too many states")


def _find_multiples(schema: Any) -> Iterator[int | float]:
    """Yield every positive number under the name `multipleOf`, anywhere in the schema."""
    for node in _objects(schema):
        if type(node.get("multipleOf")) in (int, float) and node["multipleOf"] > 0:
            yield node["multipleOf"]


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object anywhere in the schema, itself included."""
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            yield node
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
