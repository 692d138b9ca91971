"""Tells API keys that could be guessed, by their length, alphabet and fame. Pure."""

import math
import string

MIN_BITS = 128
_MIN_DISTINCT = 8  # characters; fewer are a pattern and no random text
_ALPHABETS = (
    string.digits,
    string.digits + "abcdef",
    string.digits + "ABCDEF",
    string.digits + string.ascii_lowercase,
    string.digits + string.ascii_uppercase,
    string.digits + string.ascii_letters,
)
_OTHER_SIZE = 94  # printable ASCII
_PREFIXES = ("sk-", "sk_")
# None is so short that a random key is likely to have it
_EXAMPLES = ("changeme", "example", "password", "placeholder", "millstream", "yourkey", "apikey")


def is_weak(key: str) -> bool:
    """Return True for a key of fewer than 128 bits at best, or one that reads like an example.

    `sk-` before a key does not count, and nor does punctuation between its letters and digits.
    """
    for prefix in _PREFIXES:
        key = key.removeprefix(prefix)
    text = "".join(each for each in key if each not in "-_. ")
    if len(set(text)) < _MIN_DISTINCT or any(word in text.lower() for word in _EXAMPLES):
        return True
    size = min((len(a) for a in _ALPHABETS if {*text} <= {*a}), default=_OTHER_SIZE)
    return len(text) * math.log2(size) < MIN_BITS
