"""Compressed bodies are decoded within the limit of bodies."""

import gzip
import zlib

import pytest

from api.content_encoding import decode_content
from streams.errors import BadRequest, PayloadTooLarge, UnsupportedMediaType

BODY = b'{"prompt": "hello"}' * 20


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("X-GZIP", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY, mtime=0), mtime=0)),
        ("gzip", gzip.compress(BODY[:50], mtime=0) + gzip.compress(BODY[50:], mtime=0)),
        ("", BODY),
    ],
)
def test_a_body_is_decoded_as_its_encoding_says(encoding: str, data: bytes) -> None:
    assert decode_content(data, encoding, 1000) == BODY


def test_an_unknown_encoding_is_named() -> None:
    with pytest.raises(UnsupportedMediaType, match="Content-Encoding 'br'"):
        decode_content(b"x", "br", 1000)


def test_a_bomb_is_not_decoded_over_the_limit() -> None:
    """10 MB of zeros are 10 KB: no more than the limit may come into memory."""
    with pytest.raises(PayloadTooLarge):
        decode_content(gzip.compress(bytes(10_000_000)), "gzip", 1000)


@pytest.mark.parametrize(
    "data", [BODY, gzip.compress(BODY, mtime=0)[:-4], gzip.compress(BODY, mtime=0) + b"x"]
)
def test_what_is_not_so_encoded_is_a_bad_request(data: bytes) -> None:
    with pytest.raises(BadRequest, match="Content-Encoding"):
        decode_content(data, "gzip", 1000)
