"""Builds Gemma's tokeniser from the vocabulary in a GGUF file.

transformers 5.17 can read the file, too, but makes a Unigram model without `<bos>` of it, which
gives other ids and wrong text.
"""

from pathlib import Path

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken
from transformers import GemmaTokenizer

# The file calls these text; in the model's own tokeniser they are special tokens.
IMAGE_TOKENS = "<start_of_image>", "<end_of_image>"


def read_tokenizer(path: Path) -> GemmaTokenizer:
    """Return the BPE tokeniser of a Gemma model's GGUF file; it puts `<bos>` before each text."""
    fields = GGUFReader(path).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    types: list[int] = fields["tokenizer.ggml.token_type"].contents()
    vocabulary = {_to_tokenizer_spelling(token): number for number, token in enumerate(tokens)}
    merges = _merges(vocabulary)
    tokenizer = GemmaTokenizer(vocabulary, merges, add_bos_token=True)  # type: ignore[arg-type]
    kinds = {token: kind for token, kind in zip(tokens, types, strict=True) if token in vocabulary}
    kinds |= dict.fromkeys(kinds.keys() & IMAGE_TOKENS, TokenType.CONTROL)
    tokenizer.backend_tokenizer.add_special_tokens(_added_tokens(kinds, TokenType.CONTROL))
    tokenizer.backend_tokenizer.add_tokens(_added_tokens(kinds, TokenType.USER_DEFINED))
    return tokenizer


def _to_tokenizer_spelling(token: str) -> str:
    """Write tokens of spaces alone as the tokeniser does (▁); the file has plain spaces."""
    return token if token.strip(" ") else token.replace(" ", "▁")


def _merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens whose concatenation is a token, in the order of the vocabulary.

    That is the order in which merges were learned. The file keeps no merges, and its scores are not
    in that order.
    """
    return [
        (token[:cut], token[cut:])
        for token in vocabulary
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def _added_tokens(kinds: dict[str, int], kind: TokenType) -> list[AddedToken]:
    """Tokens of a kind that are matched whole before the text is split into others."""
    return [AddedToken(token, normalized=False) for token, found in kinds.items() if found == kind]
