"""A registered model that this gateway cannot use is no harm to others."""

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from registry.artifact_verification import combine_digests, hash_files
from registry.models import Model, mock_model
from registry.store import Registry
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import cell
from tests.support.versions import make_version

CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, "vocab_size": 9}


def registered(directory: Path, name: str) -> Model:
    """The record of whatever is in the directory, which `model_from` would refuse."""
    files = hash_files(directory)
    version = make_version(
        "1", directory=str(directory), files=files, digest=combine_digests(files)
    )
    fields = {"name": name, "engine": "transformers", "versions": {"1": version}}
    return Model.model_validate({**mock_model().model_dump(), **fields, "default_version": "1"})


@pytest.mark.parametrize("tokenizer", ["{}", None])
async def test_a_gateway_serves_beside_a_model_without_a_usable_tokeniser(
    nats_url: str, tmp_path: Path, tokenizer: str | None
) -> None:
    """Registered by an earlier release, or with files that have changed: it must not end for it."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if tokenizer:
        (folder / "tokenizer.json").write_text(tokenizer)
    with capture_logs() as events:
        async with cell(nats_url) as (gateway,), connect(nats_url, "test") as broker:
            registry = await Registry.open(broker)
            await registry.add_model(registered(folder, "broken"))
            await registry.close()
            await eventually(lambda: any(e["event"] == "tokenizer_unusable" for e in events))
            assert (await gateway.complete()).status == 200
            refused = await gateway.complete(model="broken")
            assert refused.status == 500
            assert "tokenizer.json" in refused.error["message"]
