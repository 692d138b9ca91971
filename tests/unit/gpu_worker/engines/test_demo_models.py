"""Demo models are converted once, whole or not at all."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_worker.engines import demo_models

GEMMA = "gemma-3-270m"


@pytest.fixture(autouse=True)
def _wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def assemble(path: Path) -> Path:
        path.write_text("gguf")
        return path

    wheel = SimpleNamespace(MODEL_NAME="model.gguf", assemble=assemble)
    monkeypatch.setattr(demo_models, "import_module", lambda name: wheel)


def test_several_processes_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that start together would otherwise write over each other."""
    conversions: list[Path] = []

    def convert(gguf: Path, result: Path, progress: demo_models.ProgressCallback) -> None:
        assert gguf.read_text() == "gguf"
        conversions.append(result)
        (result / "config.json").write_text("{}")

    monkeypatch.setattr(demo_models, "_convert_gguf", convert)
    threads = [
        threading.Thread(target=demo_models.find_model, args=(GEMMA, tmp_path)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert (demo_models.find_model(GEMMA, tmp_path) / "config.json").read_text() == "{}"


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a model must not be found the next time."""

    def convert(gguf: Path, result: Path, progress: demo_models.ProgressCallback) -> None:
        (result / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(demo_models, "_convert_gguf", convert)
    with pytest.raises(OSError, match="disk full"):
        demo_models.find_model(GEMMA, tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".{GEMMA}.lock"]


def test_progress_ends_at_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that stops before its end looks like a failure."""
    seen: list[tuple[str, float]] = []
    monkeypatch.setattr(demo_models, "_convert_gguf", lambda *_: None)
    demo_models.find_model(GEMMA, tmp_path, lambda stage, done: seen.append((stage, done)))
    assert seen[0] == ("assemble", 0.0)
    assert seen[-1] == ("done", 1.0)


def test_an_unknown_demo_is_named(tmp_path: Path) -> None:
    """With those that there are."""
    with pytest.raises(ValueError, match="'gemma'.*gemma-3-270m, all-minilm-l6-v2"):
        demo_models.find_model("gemma", tmp_path)
