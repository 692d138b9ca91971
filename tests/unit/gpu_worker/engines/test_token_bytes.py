"""The bytes of tokens that are parts of characters, by the vocabulary's own spelling."""

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from gpu_worker.engines.paged.generating_sequence import TokenVocabulary
from gpu_worker.engines.paged.sampler import SampledToken
from gpu_worker.engines.token_bytes import token_bytes
from streams.logprob_token_text import to_bytes


def byte_level() -> Tokenizer:
    made = Tokenizer(BPE({c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, []))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


def byte_fallback() -> Tokenizer:
    entries = [f"<0x{byte:02X}>" for byte in range(256)] + ["\ufffd", "a"]
    made = Tokenizer(BPE({e: i for i, e in enumerate(entries)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return made


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()])
@pytest.mark.parametrize("text", ["🫨", "é", "aé🫨"])
def test_the_bytes_of_all_tokens_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    vocabulary = TokenVocabulary(tokenizer, frozenset())
    texts = [vocabulary.decode_token(token) for token in tokenizer.encode(text).ids]
    assert len(set(texts)) == len(texts)
    assert b"".join(map(to_bytes, texts)).decode() == text


def test_a_replacement_character_of_its_own_is_text() -> None:
    tokenizer = byte_fallback()
    vocabulary = TokenVocabulary(tokenizer, frozenset())
    token = tokenizer.token_to_id("\ufffd")
    assert token is not None
    assert vocabulary.decode_token(token) == "\ufffd"


def test_an_entry_that_spells_no_bytes_has_none() -> None:
    assert (token_bytes("▁the"), token_bytes("<0xF0>")) == (None, b"\xf0")


def test_minus_infinity_is_a_number() -> None:
    """JSON has no infinity, and null is no number."""
    vocabulary = TokenVocabulary(byte_level(), frozenset())
    found = vocabulary.to_logprobs(SampledToken(1, float("-inf"), [(2, float("-inf"))]))
    assert found
    assert (found[0].logprob, found[0].top[0][2]) == (-9999.0, -9999.0)
