"""Loads a model's tokeniser with the tokens that other files than tokenizer.json add to it.

As in transformers, these are the tokens of `added_tokens_decoder` and those that have a name
(`eos_token`, …), both in tokenizer_config.json; in older directories also added_tokens.json and
special_tokens_map.json. Gateway and worker load here, so that both know the same tokens.
"""

import codecs
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from registry.artifact_verification import (
    IS_LFS_POINTER,
    LFS_POINTER,
    ArtifactRefused,
    ReadJson,
    json_reader,
    read_object,
)
from registry.tokenizer.bert_normalizer import set_bert_normalizer

TOKENIZER = "tokenizer.json"
_CONFIG, _NAMES, _OLD_TOKENS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_DECODER = "added_tokens_decoder"
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_ORDER = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """Load the tokeniser of a model directory whose model has embeddings for `vocab_size` tokens.

    Raises `ArtifactRefused` if tokenizer.json is no tokeniser, OSError if it cannot be read.
    """
    content = (directory / TOKENIZER).read_bytes()
    return build_tokenizer(content, cache(json_reader(directory)), vocab_size)


def build_tokenizer(content: bytes, read: ReadJson, vocab_size: int) -> Tokenizer:
    """Return the tokeniser in `content`, a tokenizer.json, with what other files change in it.

    These add tokens and, for BERT's tokenisers, say what becomes of case. A token for which the
    model has no embedding, by its `vocab_size`, is left out: its text stays text. Raises
    `ArtifactRefused` if the content is no tokeniser, or a setting is none.
    """
    if read_object(read, _CONFIG).get("split_special_tokens"):
        reason = "split_special_tokens is set, by which special tokens in texts are none: remove it"
        raise ArtifactRefused(_CONFIG, reason)
    library = _parse_tokenizer(content)
    set_bert_normalizer(library, read)
    _add_tokens(library, read, vocab_size)
    return library


def _parse_tokenizer(content: bytes) -> Tokenizer:
    """Return the tokeniser in `content`; a byte order mark is left out."""
    if content.startswith(LFS_POINTER):
        raise ArtifactRefused(TOKENIZER, IS_LFS_POINTER)
    try:
        return Tokenizer.from_buffer(content.removeprefix(codecs.BOM_UTF8))
    except Exception as error:  # the library raises no narrower one
        raise ArtifactRefused(TOKENIZER, f"is no tokeniser of transformers ({error})") from None


def _add_tokens(library: Tokenizer, read: ReadJson, vocab_size: int) -> None:
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    for token, _ in _list_added_tokens(read):
        if token.content not in known and _next_id(library, token.content) < vocab_size:
            library.add_tokens([token])
            known.add(token.content)


def check_token_ids(library: Tokenizer, read: ReadJson) -> None:
    """Raise `ArtifactRefused` if a token has another id than the files that add it give it.

    `library` is the tokeniser of `build_tokenizer`. It numbers added tokens in their order; a gap
    in the ids of the files cannot be kept.
    """
    for token, expected in _list_added_tokens(read):
        found = library.token_to_id(token.content)
        if expected is not None and found not in (None, expected):
            raise ArtifactRefused(
                _CONFIG,
                f"gives the token {token.content!r} the id {expected}, {TOKENIZER} {found}: have "
                "transformers write both anew (AutoTokenizer.from_pretrained, save_pretrained)",
            )


def read_special_tokens(read: ReadJson) -> dict[str, str]:
    """Return the texts of a tokeniser's special tokens by name: `bos_token`, `eos_token`, …

    Those of tokenizer_config.json come before those of special_tokens_map.json.
    """
    return {name: _text(value) for name, value in _named_values(read).items()}


def read_end_id(library: Tokenizer, read: ReadJson) -> int | None:
    """Return the id of a tokeniser's `eos_token`; None if it has none."""
    text = read_special_tokens(read).get("eos_token")
    return library.token_to_id(text) if text else None


def _list_added_tokens(read: ReadJson) -> Iterator[tuple[AddedToken, int | None]]:
    """Yield added tokens with their ids where files say them, in the order in which to add them."""
    special = {_text(value): value for value in _special_values(read)}
    declared = read_object(read, _CONFIG).get(_DECODER)
    if isinstance(declared, dict):
        by_id = {_read_id(number): value for number, value in declared.items()}
    else:
        old = read_object(read, _OLD_TOKENS).items()
        by_id = {number: text for text, number in old if type(number) is int}
    for number, value in sorted(by_id.items()):
        if _text(value):
            yield _build_token(value, is_special=_text(value) in special), number
    yield from ((_build_token(value, is_special=True), None) for value in special.values())


def _read_id(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ArtifactRefused(_CONFIG, f"{_DECODER} has the key {text!r}, which is no id")
    return int(text)


def _named_values(read: ReadJson) -> dict[str, Any]:
    """Return all entries of the two files that name a token, in the order of transformers."""
    found: dict[str, Any] = {}
    for path in (_NAMES, _CONFIG):
        entries = read_object(read, path).items()
        found |= {n: v for n, v in entries if n.endswith("_token") and _text(v)}
    return {name: found[name] for name in (*_ORDER, *found) if name in found}


def _special_values(read: ReadJson) -> Iterator[Any]:
    """Yield the special tokens as the files have them: those with a name, then the others."""
    yield from _named_values(read).values()
    for path in (_CONFIG, _NAMES):
        content = read_object(read, path)
        for listed in (content.get(key) for key in _LISTS):
            values = listed.values() if isinstance(listed, dict) else listed
            if isinstance(listed, dict | list):
                yield from (value for value in values or () if _text(value))


def _build_token(value: Any, *, is_special: bool) -> AddedToken:
    flags = {"normalized": not is_special}
    if isinstance(value, Mapping):
        flags |= {name: bool(value[name]) for name in _FLAGS if name in value}
    return AddedToken(
        _text(value), **flags | {"special": is_special or flags.get("special", False)}
    )


def _text(value: Any) -> str:
    """Return the text of a token as files have it; empty for what is no token."""
    found = value.get("content") if isinstance(value, Mapping) else value
    return found if isinstance(found, str) else ""


def _next_id(library: Tokenizer, text: str) -> int:
    """Return the id that a token gets when it is added: its own, or the first free one."""
    own = library.token_to_id(text)
    if own is not None:
        return int(own)
    size = library.get_vocab_size(with_added_tokens=False)
    return max(size, *(number + 1 for number in library.get_added_tokens_decoder()), 0)
