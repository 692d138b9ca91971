"""A worker proves a version once, however often it loads it and is started again."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpu_worker.models.loading import Loader
from gpu_worker.settings import WorkerSettings
from registry.artifact_verification import hash_files
from registry.models import Model, Version
from tests.engine.tiny_models import CONTEXT, VOCABULARY, model, save
from tests.support.versions import make_version


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Version]:
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    directory = save(model("llama"), tmp_path / "llama")
    files = hash_files(directory)
    version = make_version(
        directory=str(directory),
        digest="d1",
        files=files,
        context_length=CONTEXT,
        vocab_size=VOCABULARY,
    )
    record = Model(
        name="tiny",
        engine="transformers",
        versions={"1": version},
        default_version="1",
    )
    return record, version


async def test_a_version_is_proven_once(registered: tuple[Model, Version], tmp_path: Path) -> None:
    """Neither a return to memory nor a restart costs another proof; a damaged file does."""
    settings = WorkerSettings(model=("tiny",), kv_tokens=1024, max_sequences=4, threads=1)
    record, version = registered

    async def count_proofs(loader: Loader) -> int:
        with capture_logs() as events:
            (await loader.load(record, version, None)).engine.close()
        return sum(event["event"] == "model_proven" for event in events)

    first = Loader(settings)
    assert [await count_proofs(first), await count_proofs(first)] == [1, 0]
    assert await count_proofs(Loader(settings)) == 0
    (file,) = (tmp_path / "cache/proofs").iterdir()
    file.write_bytes(b"{")
    assert await count_proofs(Loader(settings)) == 1
