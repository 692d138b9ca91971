"""The registry's table of model types is what transformers says, which it cannot import."""

import json
import re
from pathlib import Path

import pytest
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from gpu_worker.engines.checkpoints.loading import UnsupportedModel
from gpu_worker.engines.paged.model_loader import check_architecture as check_loaded
from gpu_worker.engines.paged.model_loader import check_model_class
from registry.artifact_verification import ArtifactRefused
from registry.checkpoints import model_types
from registry.checkpoints.families import FAMILIES
from registry.checkpoints.model_types import check_architecture, read_setting, read_types
from tests.engine.model_types import collect

ROOT = Path(__file__).parents[2]
# Of these, transformers makes no configuration, or no text part, without values.
WITHOUT_DEFAULTS = {
    "dots3_note",
    "dots3_note_text",
    "gemma4_assistant",
    "musicgen",
    "musicgen_melody",
}
GENERATING = {name for name, kind in read_types().items() if kind.generates}
CAUSAL = sorted(GENERATING - WITHOUT_DEFAULTS)


@pytest.mark.parametrize("file", [model_types.FILE, model_types.REFUSED_FILE])
def test_the_tables_are_of_the_pinned_transformers(file: Path) -> None:
    """Whoever raises the version writes them anew: see `registry/checkpoints/model_types.py`."""
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = re.search(r"^transformers==(.*)$", constraints, re.MULTILINE)
    assert pinned
    assert json.loads(file.read_text())["transformers"] == pinned[1]


@pytest.mark.skipif(
    json.loads(model_types.FILE.read_text())["transformers"] != transformers.__version__,
    reason="the table is of another version, as the test above demands",
)
def test_the_table_is_what_transformers_says() -> None:
    """`python -m tests.engine.model_types` writes it."""
    assert json.loads(model_types.FILE.read_text()) == json.loads(json.dumps(collect()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # an older GPTBigCode
@pytest.mark.parametrize("model_type", CAUSAL)
def test_what_a_worker_reads_from_a_configuration_is_refused_at_registration(
    model_type: str, tmp_path: Path
) -> None:
    """Of a config.json that says no more than its type; the sweep compares whole models."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know the type")
    config = {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        loaded = AutoConfig.from_pretrained(tmp_path)
        check_loaded(loaded)
        check_model_class(loaded)
    except UnsupportedModel:
        with pytest.raises(ArtifactRefused):
            check_architecture(config, "transformers")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_config_json_leaves_out_is_transformers_default(model_type: str) -> None:
    """A config.json need not say what its class says; nor may an absent key read as false."""
    config = CONFIG_MAPPING[model_type]()
    settings = model_types.complete({"model_type": model_type})
    keys = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    keys += ["tie_word_embeddings", *FAMILIES[model_type].if_set]
    found = {key: read_setting(settings, key) or False for key in keys}
    assert found == {key: getattr(config, key) for key in keys}
