"""Values of other kinds in JSON files are accepted or refused by name; nothing else is raised."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from registry.artifact_verification import ArtifactRefused
from registry.checkpoints.memory_use import kv_layers
from registry.lora_inspection import adapter_from
from registry.model_inspection import check_model, inspect_model
from registry.models import EngineKind, mock_model
from tests.support.checkpoints import MODULES, config_of, tokenizer_of, write_json, write_model
from tests.support.safetensors_files import LORA_CONFIG, write_adapter, write_safetensors
from tests.support.versions import make_version

OTHER_KINDS: list[Any] = [None, 7, 1.5, "x", [], [1], {"x": 1}]
TOKEN = {"content": "<s>", "special": True, "lstrip": False}
INDEX = {"metadata": {"total_size": 5}, "weight_map": {"a": "model.safetensors"}}
FILES: dict[str, Any] = {
    "generation_config.json": {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "eos_token_id": [1]},
    "tokenizer_config.json": {
        "added_tokens_decoder": {"31": TOKEN},
        "additional_special_tokens": ["t3", TOKEN],
        "bos_token": "t1",
        "chat_template": [{"name": "default", "template": "x"}],
        "do_lower_case": True,
        "eos_token": TOKEN,
        "model_max_length": 64,
        "tokenizer_class": "BertTokenizer",
    },
    "special_tokens_map.json": {"unk_token": {"content": "t0"}, "additional_special_tokens": []},
    "added_tokens.json": {"t9": 9},
    "chat_template.json": {"chat_template": "x"},
    "model.safetensors.index.json": INDEX,
    "hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}},
    "quantize_config.json": {"bits": 4},
    "adapter.json": {},
}
ENCODER_FILES: dict[str, Any] = {
    "modules.json": [*MODULES, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}],
    "1_Pooling/config.json": {"pooling_mode": ["mean", "cls"], "include_prompt": True},
    "2_Dense/config.json": {
        "in_features": 16,
        "out_features": 4,
        "bias": False,
        "activation_function": "torch.nn.Tanh",
        "use_residual": False,
    },
    "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
    "config_sentence_transformers.json": {
        "prompts": {"query": "q: "},
        "default_prompt_name": "query",
        "truncate_dim": 2,
    },
}
CONFIG: dict[str, Any] = {
    "layer_types": ["full_attention"] * 3,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": {"type": "yarn", "factor": 2.0},
    "sliding_window": 8,
    "tie_word_embeddings": False,
    "transformers_weights": "model.safetensors",
}
CLASSIFIER: dict[str, Any] = {
    "id2label": {"0": "a", "1": "b"},
    "num_labels": 2,
    "problem_type": "regression",
    "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"},
}


def changes(content: Any) -> Iterator[Any]:
    """Copies of a JSON value in which one value, at any depth, is of another kind or absent."""
    for path in paths(content):
        for value in OTHER_KINDS:
            yield replaced(content, path, value)
    if isinstance(content, dict):
        yield from ({k: v for k, v in content.items() if k != key} for key in content)
        yield content | {"7": 7}


def paths(content: Any) -> Iterator[tuple[Any, ...]]:
    yield ()
    if isinstance(content, dict | list):
        for key in content if isinstance(content, dict) else range(len(content)):
            yield from ((key, *rest) for rest in paths(content[key]))


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    made = copy.deepcopy(content)
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return made


def write_all(directory: Path, engine: EngineKind) -> dict[str, Any]:
    """A model's directory with every file that is read; returns the contents of its JSON files."""
    model_type = "llama" if engine == "transformers" else "bert"
    config = config_of(model_type, engine) | CONFIG | (CLASSIFIER if engine == "classify" else {})
    write_model(directory, config, engine=engine)
    files = FILES | (ENCODER_FILES if engine == "embed" else {})
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        write_json(directory / name, content)
    if engine == "embed":
        write_safetensors(directory / "2_Dense/model.safetensors", {"linear.weight": (4, 16)})
    return {"config.json": config, "tokenizer.json": tokenizer_of(2, t40=31), **files}


def check_all(directory: Path) -> None:
    """Run what the commands run on a directory: the checks, the record, the memory."""
    findings = check_model(directory)
    assert all(isinstance(each.path, str) for each in findings)
    if any(each.is_refusal for each in findings):
        return
    inspect_model(directory)
    kv_layers(json.loads((directory / "config.json").read_text()))


@pytest.mark.parametrize("engine", ["transformers", "embed", "classify"])
def test_a_value_of_another_kind_is_refused_or_means_nothing(
    tmp_path: Path, engine: EngineKind
) -> None:
    """A traceback names no file, and passes for a fault of ours."""
    contents = write_all(tmp_path, engine)
    for name, content in contents.items():
        before = (tmp_path / name).read_bytes()
        for changed in changes(content):
            write_json(tmp_path / name, changed)
            try:
                check_all(tmp_path)
            except Exception as error:
                raise AssertionError(f"{name} as {json.dumps(changed)}") from error
        (tmp_path / name).write_bytes(before)


def test_an_adapters_values_of_another_kind_are_refused_or_mean_nothing(tmp_path: Path) -> None:
    """Those of its configuration, and of its base's."""
    base = write_model(tmp_path / "base", config_of("llama"))
    version = make_version("1", directory=str(base), files={"model.safetensors": "0"})
    model = mock_model("m").model_copy(update={"engine": "transformers"})
    adapter = write_adapter(tmp_path / "adapter")
    settings = LORA_CONFIG | {
        "alpha_pattern": {"q_proj": 2},
        "rank_pattern": {},
        "use_rslora": True,
    }
    for changed in changes(settings):
        write_json(adapter / "adapter_config.json", changed)
        try:
            adapter_from(adapter, "a", model, version)
        except ArtifactRefused:
            continue
        except Exception as error:
            raise AssertionError(json.dumps(changed)) from error
