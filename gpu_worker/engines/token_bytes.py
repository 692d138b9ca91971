"""The bytes of tokens that are parts of characters, as the two kinds of vocabularies write them.

Pure.
"""

import re

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(entry: str) -> bytes | None:
    """Return the bytes that a vocabulary's entry stands for; None if that cannot be told.

    SentencePiece writes a byte as `<0xF0>`; byte-level BPE has a character for each byte.
    """
    if found := _FALLBACK.fullmatch(entry):
        return bytes.fromhex(found[1])
    if entry and all(character in _BYTE_OF_CHARACTER for character in entry):
        return bytes(_BYTE_OF_CHARACTER[character] for character in entry)
    return None


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: printable bytes are their own character, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
