"""Decodes compressed request bodies, as `Content-Encoding` says, within a limit of bytes. Pure."""

import zlib

from streams.errors import BadRequest, PayloadTooLarge, UnsupportedMediaType

_GZIP, _ZLIB = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS
_WINDOWS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _ZLIB}
ACCEPTED = "gzip, deflate"


def decode_content(data: bytes, encoding: str, limit: int) -> bytes:
    """Return the body that was sent as `data` with the given `Content-Encoding`.

    No more than `limit` bytes are ever decoded. Raises `PayloadTooLarge` for a longer body,
    `UnsupportedMediaType` for an encoding that is not known, and `BadRequest` for one that `data`
    does not have.
    """
    names = [name.strip().lower() for name in encoding.split(",") if name.strip()]
    for name in reversed(names):
        if name != "identity":
            data = _inflate(data, name, limit)
    return data


def _inflate(data: bytes, name: str, limit: int) -> bytes:
    if name not in _WINDOWS:
        raise UnsupportedMediaType(
            f"the Content-Encoding {name!r} is not supported; supported are: {ACCEPTED}"
        )
    decoded = bytearray()
    try:
        while data:
            inflater = zlib.decompressobj(_WINDOWS[name])
            decoded += inflater.decompress(data, limit + 1 - len(decoded))
            if len(decoded) > limit:
                raise PayloadTooLarge(len(decoded), limit)
            if not inflater.eof:
                raise BadRequest(f"the body ends within its Content-Encoding, {name}")
            data = inflater.unused_data  # gzip may have several members
    except zlib.error:
        raise BadRequest(f"the body is not in its Content-Encoding, {name}") from None
    return bytes(decoded)
