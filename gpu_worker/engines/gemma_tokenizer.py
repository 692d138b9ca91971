"""Gemma's tokeniser, from the vocabulary in a GGUF file.

transformers reads it, too, but 5.17 makes a Unigram without `<bos>` of it: other ids, wrong text.
"""

from pathlib import Path

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken
from transformers import GemmaTokenizer

# The file calls them text; they are special to the model's own tokeniser, and no text to a reader.
IMAGE_TOKENS = "<start_of_image>", "<end_of_image>"


def read_tokenizer(path: Path) -> GemmaTokenizer:
    """The BPE of a Gemma model, with `<bos>` before each text."""
    fields = GGUFReader(path).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    types: list[int] = fields["tokenizer.ggml.token_type"].contents()
    vocabulary = {_to_tokenizer_spelling(token): number for number, token in enumerate(tokens)}
    merges = _merges(vocabulary)
    made = GemmaTokenizer(vocabulary, merges, add_bos_token=True)  # type: ignore[arg-type]
    kinds = {token: kind for token, kind in zip(tokens, types, strict=True) if token in vocabulary}
    kinds |= dict.fromkeys(kinds.keys() & IMAGE_TOKENS, TokenType.CONTROL)
    made.backend_tokenizer.add_special_tokens(_added_tokens(kinds, TokenType.CONTROL))
    made.backend_tokenizer.add_tokens(_added_tokens(kinds, TokenType.USER_DEFINED))
    return made


def _to_tokenizer_spelling(token: str) -> str:
    """The file has runs of spaces as such; the tokeniser looks for them as it writes spaces."""
    return token if token.strip(" ") else token.replace(" ", "▁")


def _merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to put a token together of two, earlier tokens first: the order of learning.

    The file keeps no merges, and its scores are not in that order.
    """
    return [
        (token[:cut], token[cut:])
        for token in vocabulary
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def _added_tokens(kinds: dict[str, int], kind: TokenType) -> list[AddedToken]:
    """Tokens that are found whole in a text, before it is cut into others."""
    return [AddedToken(token, normalized=False) for token, found in kinds.items() if found == kind]
