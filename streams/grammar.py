"""Grammars of requests: translates a `Grammar` into llguidance's form and enforces limits on it.

The gateway checks a grammar here before it queues the request; the worker compiles the translation.
A client's grammar must not hang either of them or use up their memory. llguidance bounds most of
that itself (size, nesting, states, work per token); the cases that it was seen not to bound are
refused here. Pure.
"""

from collections.abc import Iterator
from fractions import Fraction
from math import lcm
from typing import Any, Literal

import orjson
from llguidance import LLMatcher, LLParserLimits

from streams.errors import BadGrammar
from streams.messages import Grammar

MAX_CHARACTERS = 65_536
MAX_REMAINDERS = 10_000  # `multipleOf` compiles to one state each: 25 ms; 8 s at 1,000,000
WHITESPACE = r"[ \t\r\n]{1,32}"  # between JSON tokens; unbounded, some models emit it for ever
LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,  # for one token's mask: some 7 ms
    max_lexer_states=50_000,  # some 100 MB
    verbose_errors=False,
)
_ANY_OBJECT = '{"type":"object"}'


def to_llguidance(grammar: Grammar) -> str:
    """Return a grammar translated into the form that llguidance, the compiler of grammars, reads.

    Raises `BadGrammar` if the grammar is over a size limit or is a JSON schema that llguidance
    cannot read. A regular expression is not checked here; `check_grammar` does that.
    """
    if len(grammar.source) > MAX_CHARACTERS:
        size = len(grammar.source)
        raise BadGrammar(f"a grammar of {size} characters is over the limit of {MAX_CHARACTERS}")
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    source = grammar.source if grammar.kind == "json_schema" else _ANY_OBJECT
    _check_multiples(_parse_json(source))
    try:
        return LLMatcher.grammar_from_json_schema(
            source, overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError as error:
        raise grammar_error(grammar.kind, str(error)) from None


def check_grammar(grammar: Grammar) -> None:
    """Compile a grammar as a check; raises `BadGrammar` with the reason if that fails.

    Blocks for about 1 ms, some 100 ms at worst.
    """
    failed, messages = LLMatcher.validate_grammar_with_warnings(
        to_llguidance(grammar), limits=LIMITS
    )
    if failed:
        raise grammar_error(grammar.kind, messages[0])


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
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if type(node.get("multipleOf")) in (int, float) and node["multipleOf"] > 0:
                yield node["multipleOf"]
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
