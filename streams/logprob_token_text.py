"""Texts of tokens that are only a part of a character's UTF-8, spelt as OpenAI spells them.

The first two bytes of an emoji are the text `bytes:\\xf0\\x9f`. Pure.
"""

import re
from collections.abc import Sequence

_PREFIX = "bytes:"
_SPELT = re.compile(r"bytes:(?:\\x[0-9a-f]{2})+")


def spell_bytes(data: bytes) -> str:
    """Return the text that stands for bytes which are no whole character."""
    return _PREFIX + "".join(f"\\x{byte:02x}" for byte in data)


def to_bytes(text: str) -> bytes:
    """Return the UTF-8 of a token's text; of a part of a character, the bytes that it spells."""
    if not _SPELT.fullmatch(text):
        return text.encode()
    return bytes.fromhex(text.removeprefix(_PREFIX).replace("\\x", ""))


def bare_text(text: str) -> str:
    """Return a token's text as chats have it: parts of characters without `bytes:`."""
    return text.removeprefix(_PREFIX) if _SPELT.fullmatch(text) else text


def count_characters(texts: Sequence[str], cut: bytes = b"") -> tuple[list[int], bytes]:
    """Return how many characters begin before each token, and the bytes of a cut one at the end.

    `cut` are the bytes of a character that tokens before these have begun. A character counts once
    it is whole, so that all its tokens have its own place.
    """
    counts, count = [], 0
    for text in texts:
        counts.append(count)
        cut += to_bytes(text)
        whole = cut.decode(errors="ignore") if _is_prefix(cut) else cut.decode(errors="replace")
        count += len(whole)
        cut = cut[len(whole.encode()) :] if _is_prefix(cut) else b""
    return [*counts, count], cut


def _is_prefix(data: bytes) -> bool:
    """True if the data is UTF-8 that at most lacks the rest of its last character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True
