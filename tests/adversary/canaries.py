"""Secrets that no adversary may read, and their recognition in the bytes it was sent. Pure."""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from streams.messages import pack_tokens
from streams.records.webhooks.signatures import SECRET_PREFIX

_REQUEST_ID = re.compile(rb"[0-9a-f]{32}")
_BATCH_ID = re.compile(rb"(?<![0-9a-f])[0-9a-f]{24}(?![0-9a-f])")  # and of a file
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{24,}={0,2}")  # JetStream's JSON has messages so

KEYS, TENANTS, REQUESTS, BATCHES = "keys", "tenants", "requests", "batches"
WEBHOOKS = "secrets of webhooks"
# Where prompts are that are to no model alone
OF_BATCHES, OF_RESPONSES = "batches' lines", "stored responses"


def prompts_of(model: str) -> str:
    """The name of the kind of secret that prompts to a model are."""
    return f"prompts of {model}"


@dataclass
class Canaries:
    """Strings that are in victims' secrets and nowhere else, by kind; ids of their requests.

    A message with the id of a victim's request in it is about that request: a part of its token
    log, a note, a cancel.
    """

    strings: dict[str, set[bytes]] = field(default_factory=dict)
    request_ids: set[bytes] = field(default_factory=set)
    batch_ids: set[bytes] = field(default_factory=set)  # and those of files

    def add_prompt(self, model: str, canary: str) -> None:
        """A string that is in prompts; the mock's tokens are its bytes."""
        tokens = pack_tokens(list(canary.encode()))
        self.strings.setdefault(prompts_of(model), set()).update((canary.encode(), tokens))

    def add_tenant(self, name: str, key: str) -> None:
        """A tenant's name, and its key in each form that is sent or stored."""
        digest = hashlib.sha256(key.encode())
        forms = (key.encode(), digest.digest(), digest.hexdigest().encode())
        self.strings.setdefault(KEYS, set()).update(forms)
        self.strings.setdefault(TENANTS, set()).add(name.encode())

    def add_webhook(self, secret: str) -> None:
        """The signing secret of an endpoint as its owner was told it, and as it is stored."""
        text = secret.removeprefix(SECRET_PREFIX)
        self.strings.setdefault(WEBHOOKS, set()).update((text.encode(), base64.b64decode(text)))

    def find(self, data: bytes) -> set[str]:
        """The kinds of secrets in what was received, also where a part of it is in base64."""
        return set().union(*(self._find(form) for form in (data, *_decoded(data))))

    def _find(self, data: bytes) -> set[str]:
        found = {kind for kind, known in self.strings.items() if any(c in data for c in known)}
        if not self.request_ids.isdisjoint(_REQUEST_ID.findall(data)):
            found.add(REQUESTS)
        if not self.batch_ids.isdisjoint(_BATCH_ID.findall(data)):
            found.add(BATCHES)
        return found


def _decoded(data: bytes) -> Iterable[bytes]:
    for run in _BASE64.findall(data):
        try:
            yield base64.b64decode(run + b"=" * (-len(run) % 4))
        except binascii.Error:
            continue  # a long word


class Received:
    """Counts what one attack has received: bytes of messages in which a secret is, by kind."""

    def __init__(self, canaries: Canaries) -> None:
        self._canaries = canaries
        self.bytes_by_kind: dict[str, int] = {}
        self.total = 0
        self._unsearched: list[bytes] = []

    def add(self, *parts: bytes) -> None:
        """One message: what belongs together counts as a whole."""
        data = b"\n".join(parts)
        self.total += len(data)
        self._unsearched.append(data)

    def search(self) -> Mapping[str, int]:
        """Bytes of messages with a secret in them, by kind; ids that are known by now count."""
        unsearched, self._unsearched = self._unsearched, []
        for data in unsearched:
            for kind in self._canaries.find(data):
                self.bytes_by_kind[kind] = self.bytes_by_kind.get(kind, 0) + len(data)
        return self.bytes_by_kind
