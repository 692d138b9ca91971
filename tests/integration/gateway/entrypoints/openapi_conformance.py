"""schemathesis against a running gateway.

    python -m tests.integration.gateway.entrypoints.openapi_conformance [EXAMPLES] [SEED]

It makes requests of `/openapi.json`, good and bad ones, and holds the answers against it. Which
models there are no document tells, so it is told here.
"""

import asyncio
import json
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from tests.support.accounts_server import AccountsServer
from tests.support.gateways import KEY, RunningGateway, cell

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "allow_header_conformance",
    "unsupported_method",
)
# A deadline of a millisecond is a good request, and 504 its right answer.
SETTINGS = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "504"]
"""


async def run_schemathesis(gateway: RunningGateway, home: Path, *words: str) -> str:
    """What it says at its end; raises if it found anything."""
    document = (await gateway.request("GET", "/openapi.json", key=None)).json
    return await check_document(_with_models(document), gateway.url, KEY, home, *words)


async def check_document(document: Any, url: str, key: str, home: Path, *words: str) -> str:
    """Hold what answers at `url` against a document; raises if anything differs."""
    (home / "schemathesis.toml").write_text(SETTINGS)
    (home / "openapi.json").write_text(json.dumps(document))
    words += ("openapi.json", "--url", url, "--checks", ",".join(CHECKS), "--no-color")
    words += ("--header", f"Authorization: Bearer {key}", "--generation-database", "none")
    words += ("--suppress-health-check", "all", "--warnings", "off")
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    running = await asyncio.create_subprocess_exec(
        *(str(program), "run", *words), cwd=home, stdout=-1, stderr=-2
    )
    output = (await running.communicate())[0].decode()
    assert running.returncode == 0, output
    return output


def _with_models(document: Any) -> Any:
    """The document with the names of our models, and answers short enough to wait for."""
    for schema in document["components"]["schemas"].values():
        properties = schema.get("properties", {})
        if "model" in properties:
            generates = properties.keys() & {"messages", "prompt"}
            properties["model"] = {"const": "mock" if generates else "vectors"}
        for limit in properties.keys() & {"max_tokens", "max_completion_tokens"}:
            properties[limit] = {"type": "integer", "minimum": 1, "maximum": 8}
    return document


async def _main(examples: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        broker = AccountsServer(Path(home))
        try:
            async with cell(broker.url) as (gateway,):
                words = ("--max-examples", str(examples), "--seed", str(seed))
                print(await run_schemathesis(gateway, Path(home), *words))
        finally:
            broker.kill()
        assert broker.violations() == []


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    asyncio.run(_main(numbers[0] if numbers else 1000, numbers[1] if numbers[1:] else 1))
