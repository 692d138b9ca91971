"""What a `Grammar` means: the one translation into llguidance's form, with its limits.

The gateway checks with it before anything is queued, the worker compiles what it gives. Neither
may be hung or filled up by a stranger's grammar. llguidance bounds most of that itself (size,
nesting, states, work per token); what it was seen not to bound is refused here. Pure.
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
MAX_REMAINDERS = 10_000  # `multipleOf` is compiled to a state each: 25 ms; 8 s at 1,000,000
WHITESPACE = r"[ \t\r\n]{1,32}"  # between JSON's tokens; without a bound some models never go on
LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,  # of one token's mask: some 7 ms
    max_lexer_states=50_000,  # some 100 MB
    verbose_errors=False,
)
_ANY_OBJECT = '{"type":"object"}'


def to_llguidance(grammar: Grammar) -> str:
    """The grammar in llguidance's form. Raises `BadGrammar` for what must not be compiled."""
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
    """Raise `BadGrammar` with the compiler's reason. Takes about 1 ms, some 100 ms at worst."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(
        to_llguidance(grammar), limits=LIMITS
    )
    if failed:
        raise grammar_error(grammar.kind, messages[0])


def grammar_error(kind: Literal["json_object", "json_schema", "regex"], reason: str) -> BadGrammar:
    """The compiler's reason as an error, without the source that it quotes."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("error: ")), lines[0])
    return BadGrammar(f"the {kind} cannot be used: {said.removeprefix('error: ')[:200]}")


def _parse_json(source: str) -> Any:
    try:
        return orjson.loads(source)
    except ValueError as error:
        raise BadGrammar(f"the JSON schema is not JSON: {error}") from None


def _check_multiples(schema: Any) -> None:
    """A number's remainder by all its divisors together is a state of the compiled lexer."""
    over, under = 1, 1
    for number in _find_multiples(schema):
        divisor = Fraction(str(number))
        over, under = lcm(over, divisor.numerator), lcm(under, divisor.denominator)
        if over * under > MAX_REMAINDERS:
            raise BadGrammar(f"the schema's multipleOf, up to {number}, make too many states")


def _find_multiples(schema: Any) -> Iterator[int | float]:
    """Every number under the name `multipleOf`, wherever it stands."""
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if type(node.get("multipleOf")) in (int, float) and node["multipleOf"] > 0:
                yield node["multipleOf"]
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
