"""Registration knows transformers' model types: their classes, defaults and refusals."""

from pathlib import Path
from typing import Any

import pytest

from registry.artifact_verification import ArtifactRefused
from registry.checkpoints.memory_use import kv_layers
from registry.checkpoints.model_types import check_architecture, complete, text_settings
from registry.model_inspection import check_model, inspect_model
from registry.models import EngineKind
from tests.support.checkpoints import config_of, write_model


def refusal(engine: EngineKind = "transformers", **config: Any) -> str:
    try:
        check_architecture(config, engine)
    except ArtifactRefused as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("gpt_oss", "GptOssForCausalLM", "attention sinks"),
        ("bart", "BartForCausalLM", "an encoder and a decoder"),
        ("diffllama", "DiffLlamaForCausalLM", "computed twice in a layer"),
        ("mamba", "MambaForCausalLM", "layers of type linear_attention"),
        ("t5", "T5ForConditionalGeneration", "no causal language model for its type 't5'"),
        ("whisper", "WhisperForConditionalGeneration", "an encoder and a decoder"),
        ("mllama", "MllamaForConditionalGeneration", "no causal language model for its type"),
        ("deepseek_v3", "DeepseekV3ForCausalLM", "multi-head latent attention"),
        ("gemma2", "Gemma2ForCausalLM", "soft-capped attention"),
        ("bloom", "BloomForCausalLM", "takes no positions"),
        ("roberta", "RobertaForCausalLM", "log probabilities"),
        ("llama", "NoSuchForCausalLM", "names NoSuchForCausalLM, which transformers does not"),
        ("new", "NewForCausalLM", "model_type 'new' is none of the"),
    ],
)
def test_what_a_worker_would_refuse_is_refused_at_registration(
    tmp_path: Path, model_type: str, architecture: str, reason: str
) -> None:
    """Before anyone sends a request, and with what to do instead."""
    config = config_of("llama") | {"model_type": model_type, "architectures": [architecture]}
    config.pop("attn_logit_softcapping")
    (found,) = check_model(write_model(tmp_path, config, {"model.a": (1,)}))
    assert found.is_refusal
    assert found.path == "config.json"
    assert reason in found.reason
    assert "(--remote)" in found.reason


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of type chunked_"),
        ({"rope_scaling": {"type": "longrope"}}, "depend on the longest sequence"),
        ({"rope_parameters": {"full": {"rope_type": "longrope"}}}, "depend on the longest"),
        ({"kv_lora_rank": 8}, "latent attention"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ""),
        ({"rope_scaling": {"type": "yarn"}}, ""),
    ],
)
def test_a_feature_that_config_json_declares_is_refused(
    values: dict[str, Any], reason: str
) -> None:
    """At the top, or in the part that describes the text model."""
    whole = refusal(model_type="llama", **values)
    part = refusal(model_type="gemma3", text_config=values)
    assert (bool(whole), bool(part)) == (bool(reason), bool(reason))
    assert reason in whole
    assert reason in part


def test_a_declared_value_goes_before_the_default() -> None:
    """A Gemma 2 without soft capping is a model like others."""
    assert "soft-capped" in refusal(model_type="gemma2")
    assert refusal(model_type="gemma2", attn_logit_softcapping=None) == ""


@pytest.mark.parametrize(
    ("engine", "model_type", "reason"),
    [
        ("classify", "bart", "'bart' has an encoder and a decoder"),
        ("classify", "t5", "'t5' has an encoder and a decoder"),
        ("classify", "granite", "no sequence classifier of the type 'granite'"),
        ("classify", "bert", ""),
        ("embed", "blenderbot", "'blenderbot' has a decoder, too"),
        ("embed", "nystromformer", "depends on the inputs of its batch"),
        ("embed", "convbert", "depends on the inputs of its batch"),
        ("embed", "xlm-roberta", ""),
        ("embed", "t5", ""),  # its encoder can be loaded alone
        ("embed", "qwen3", ""),
    ],
)
def test_encoders_and_classifiers_have_their_own_refusals(
    engine: EngineKind, model_type: str, reason: str
) -> None:
    """RoBERTa is no decoder here, and a good encoder."""
    found = refusal(engine, model_type=model_type)
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize("name", [None, 5, ["llama"], {}])
def test_a_type_that_is_no_name_is_refused(name: object) -> None:
    """A lookup must not raise what the check does not catch."""
    assert "has the model_type" in refusal(model_type=name)


def test_what_config_json_leaves_out_is_the_classs_default(tmp_path: Path) -> None:
    """Gemma 3 of 4B and more, as the Hub has it: neither vocabulary nor context."""
    text = {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    write_model(tmp_path, config | {"vocab_size": 9}, {"a": (1,)})
    found = inspect_model(tmp_path)
    assert (found.context_length, found.vocab_size) == (131072, 262208)
    windows = [layer.window for layer in kv_layers(config)]
    assert windows[:6] == [4096] * 5 + [None]
    assert len(windows) == 34


def test_a_text_part_need_not_name_its_type() -> None:
    """The type of the whole says it."""
    settings = text_settings({"model_type": "gemma3", "text_config": {"hidden_size": 8}})
    assert (settings["model_type"], settings["head_dim"]) == ("gemma3_text", 256)
    flat = text_settings({"model_type": "gemma3", "hidden_size": 8})
    assert (flat["hidden_size"], flat["vocab_size"]) == (8, 262208)


def test_keys_are_completed_under_the_types_own_names() -> None:
    """Completing twice changes nothing, and unknown types stay as they are."""
    once = complete({"model_type": "gpt2", "hidden_size": 64})
    assert (once["n_embd"], once["n_layer"]) == (64, 12)
    assert "hidden_size" not in once
    assert complete(once) == once
    assert complete({"model_type": "new", "x": 1}) == {"model_type": "new", "x": 1}


@pytest.mark.parametrize("part", ["x", 5, [1]])
def test_a_part_that_is_no_object_is_refused(part: object) -> None:
    """By the file's and the key's name."""
    with pytest.raises(ArtifactRefused, match=r"config\.json: text_config is .* not an object"):
        text_settings({"model_type": "gemma3", "text_config": part})
