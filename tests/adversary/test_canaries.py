"""A secret is recognised in each form in which the broker and the gateway send it."""

import base64
import hashlib

import pytest

from streams.messages import pack_tokens
from tests.adversary.canaries import KEYS, REQUESTS, TENANTS, Canaries, Received, prompts_of
from tests.adversary.promises import PROMISES, Adversary
from tests.adversary.target_subjects import covers

PROMPT, KEY, REQUEST = "mulberry-55d1e0", "sk-northwind-1", "0123456789abcdef" * 2


@pytest.fixture
def canaries() -> Canaries:
    """Of one tenant, one prompt and one request."""
    made = Canaries()
    made.add_prompt("mock", PROMPT)
    made.add_tenant("northwind", KEY)
    made.request_ids.add(REQUEST.encode())
    return made


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (f'{{"prompt": "{PROMPT} and more"}}'.encode(), prompts_of("mock")),
        (b"\x81\xa6" + pack_tokens(list(PROMPT.encode())), prompts_of("mock")),
        (
            b'{"data":"' + base64.b64encode(f"a prompt with {PROMPT} in it".encode()) + b'"}',
            prompts_of("mock"),
        ),
        (f"Authorization: Bearer {KEY}".encode(), KEYS),
        (hashlib.sha256(KEY.encode()).hexdigest().encode(), KEYS),
        (b'millstream_requests_total{tenant="northwind"} 1', TENANTS),
        (f"infer.reply.x.gw-g1.{REQUEST}".encode(), REQUESTS),
    ],
)
def test_a_secret_is_found(canaries: Canaries, data: bytes, kind: str) -> None:
    """As text, as the mock's tokens, as a hash, and in JetStream's base64."""
    assert kind in canaries.find(data)
    received = Received(canaries)
    received.add(data)
    received.add(b"nothing")
    assert received.search()[kind] == len(data)


def test_what_is_no_secret_is_not(canaries: Canaries) -> None:
    """Other requests' ids, and base64 of something else."""
    for data in (b"f" * 32, base64.b64encode(bytes(64)), b"mulberry", b""):
        assert canaries.find(data) == set()


@pytest.mark.parametrize(
    ("pattern", "subject", "is_covered"),
    [
        ("infer.>", "infer.gone", True),
        ("infer.>", "infer", False),
        ("infer.submit.mallory.*.*", "infer.submit.mallory.m.batch", True),
        ("infer.submit.mallory.*.*", "infer.submit.acme.m.batch", False),
        ("infer.submit.mallory.*.*", "infer.submit.mallory.m", False),
        ("infer.cancel.*", "infer.cancel.mallory.x", False),
    ],
)
def test_patterns_cover_as_the_broker_does(pattern: str, subject: str, is_covered: bool) -> None:
    """A token for a star, one or more for the rest."""
    assert covers(pattern, subject) is is_covered


def test_tenants_and_workers_are_promised_less_than_everything() -> None:
    """No prompts of other models, no keys, and no records that operators decide."""
    for adversary in (
        Adversary.NOBODY,
        Adversary.TENANT_KEY,
        Adversary.TENANT_USER,
        Adversary.PAGE,
    ):
        assert PROMISES[adversary].reads == frozenset()
    worker = PROMISES[Adversary.WORKER]
    assert not worker.reads & {prompts_of("mock"), KEYS}
    assert not worker.allows("$KV.tenants.northwind")
    assert not worker.allows("infer.request.northwind.mock.batch")
