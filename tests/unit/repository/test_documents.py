"""What docs/ says is what the code has: a renamed field must not outlive its name."""

import re
from pathlib import Path

import pytest

from api.schemas.fields import Body
from api.schemas.websocket_frames import ClassifyFrame, EmbedFrame, GenerateFrame, ResumeFrame
from gateway.entrypoints.websocket import MAX_OPEN_REQUESTS, SUBPROTOCOLS
from streams.errors import HTTP_STATUS

ROOT = Path(__file__).parents[3]
WEBSOCKET = (ROOT / "docs/websocket.md").read_text()
# Of files (docs/files.md)
STORAGE_ONLY = {"storage_quota_exceeded", "storage_full", "file_lost"}
HTTP_ONLY = {
    "unsupported_media_type",
    "invalid_api_key",
    "invalid_token",
    "issuer_unreachable",
    "forbidden",
    "not_found",
    "method_not_allowed",
    "too_many_connections",
    "too_many_wrong_keys",
    "headers_too_large",
    "request_timeout",
    "too_many_transfers",
    *STORAGE_ONLY,
}
# Of the admin API (docs/admin.md)
ADMIN_ONLY = {
    "key_taken",
    "key_not_found",
    "key_ended",
    "admin_key_exists",
    "audit_full",
    "no_key_pepper",
    "no_broker_keys",
    "accounts_not_told",
    "tenant_not_publishing",
    "account_not_found",
    "name_taken",
    "tenant_configured",
    "tenant_exists",
    "tenant_not_found",
    "version_exists",
    "alias_moved",
}
NOT_AN_ERROR_THERE = {"cancelled"}  # a `done` frame


def section(title: str) -> str:
    """The text from a heading to the next one of its level or above."""
    level = title.split(" ")[0]
    body = WEBSOCKET.split(f"\n{title}\n", 1)[1]
    return re.split(rf"\n#{{1,{len(level)}}} ", body, maxsplit=1)[0]


def named(text: str) -> set[str]:
    """The names in the first column of the text's tables."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize(
    ("title", "frame"),
    [
        ("### `generate`", GenerateFrame),
        ("### `embed`", EmbedFrame),
        ("### `classify`", ClassifyFrame),
        ("### `resume`", ResumeFrame),
    ],
)
def test_every_field_of_a_frame_is_documented(title: str, frame: type[Body]) -> None:
    """Unknown fields are refused, so the document must name exactly those that are known."""
    assert named(section(title)) == set(frame.model_fields) - {"type"}


def test_every_error_code_is_documented() -> None:
    """Clients branch on codes; one that is not written down is one they cannot handle."""
    there = set(HTTP_STATUS) - HTTP_ONLY - ADMIN_ONLY - NOT_AN_ERROR_THERE
    assert named(section("### Error codes")) == there
    admin = (ROOT / "docs/admin.md").read_text()
    assert {code for code in ADMIN_ONLY if f"`{code}`" in admin} == ADMIN_ONLY


def test_the_limits_are_those_of_the_code() -> None:
    """A number in a document has no compiler."""
    assert f"| open requests of one socket | {MAX_OPEN_REQUESTS} |" in WEBSOCKET
    assert all(f"`{name}`" in WEBSOCKET for name in SUBPROTOCOLS)


@pytest.mark.parametrize("example", ["producer.py", "durable.py", "job.py"])
def test_the_producer_shown_is_the_producer_shipped(example: str) -> None:
    """The example in the text is the file that a test runs."""
    source = (ROOT / "millstream/tenants/examples" / example).read_text().strip()
    assert f"```python\n{source}\n```" in (ROOT / "docs/producers.md").read_text()
