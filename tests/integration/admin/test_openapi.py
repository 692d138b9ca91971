"""What `/admin/v1/openapi.json` says is what the admin service does."""

from pathlib import Path

from admin import openapi
from tests.integration.gateway.entrypoints.openapi_conformance import check_document
from tests.support.admins import ADMIN_KEY, running_admin


async def test_the_admin_service_keeps_to_its_schema(nats_url: str, tmp_path: Path) -> None:
    """No fault of the server, and no answer that is not in the document."""
    words = ("--phases", "coverage,fuzzing", "--max-examples", "10", "--seed", "1")
    async with running_admin(nats_url) as client:
        await check_document(openapi.build_document(), client.url, ADMIN_KEY, tmp_path, *words)
