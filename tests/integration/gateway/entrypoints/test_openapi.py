"""What `/openapi.json` says is what the gateway does."""

from pathlib import Path

from tests.integration.gateway.entrypoints.openapi_conformance import run_schemathesis
from tests.support.gateways import cell


async def test_the_gateway_keeps_to_its_schema(nats_url: str, tmp_path: Path) -> None:
    """No fault of the server's, and no answer that is not in the document, to hundreds of requests.

    `python -m tests.integration.gateway.entrypoints.openapi_conformance` makes some ten thousand.
    """
    async with cell(nats_url) as (gateway,):
        await run_schemathesis(
            gateway, tmp_path, "--phases", "fuzzing", "--max-examples", "20", "--seed", "1"
        )
