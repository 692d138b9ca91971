"""Counts how often a regular expression repeats its parts, without compiling it. Pure."""

import re

_TOKEN = re.compile(r"\\[pPxuU]\{[^}]*\}|\\.|\{(?P<count>\d+)(?:,\d*)?\}|.", re.DOTALL)
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")  # white space and comments are not part of the pattern
_IGNORED = re.compile(r"\\.|\s+|#[^\n]*", re.DOTALL)
_MAX_DIGITS = 9
_ENOUGH = 10**9  # no need to count further


def count_repeated(pattern: str) -> int:
    """Return how many atoms the pattern's least counts add to those that are written.

    `x{1000}` adds 999, and `(x{10}){10}` adds 99. The syntax is that of Rust's `regex`; of an
    invalid pattern the result means nothing.
    """
    if _VERBOSE.search(pattern):
        pattern = _IGNORED.sub(lambda found: found[0] if found[0][0] == "\\" else "", pattern)
    sizes, last, written, at = [0], 0, 0, 0
    while token := _TOKEN.match(pattern, at):
        at = token.end()
        if token["count"]:
            times = max(1, int(token["count"][:_MAX_DIGITS]))
            sizes[-1] += min(last * (times - 1), _ENOUGH)
            last = min(last * times, _ENOUGH)
        elif token[0] == "(":
            sizes.append(0)
        elif token[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif token[0] not in "*+?|":
            at = _class_end(pattern, at) if token[0] == "[" else at
            sizes[-1] += 1
            last, written = 1, written + 1
    return sum(sizes) - written


def _class_end(pattern: str, at: int) -> int:
    """Return the index behind a character class, whose content begins at `at`; they may nest."""
    depth = 1
    at += pattern.startswith("^", at)
    at += pattern.startswith("]", at)
    while depth and at < len(pattern):
        depth += (pattern[at] == "[") - (pattern[at] == "]")
        at += 2 if pattern[at] == "\\" else 1
    return at
