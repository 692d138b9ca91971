"""A checkpoint with a hole, or of another configuration, is refused before it is registered."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry.checkpoints.families import FAMILIES
from registry.checkpoints.model_types import read_types
from registry.model_inspection import check_model
from registry.models import EngineKind
from tests.support.checkpoints import Shapes, config_of, shapes_of, write_model
from tests.support.safetensors_files import write_safetensors

DECODERS = [name for name, family in FAMILIES.items() if family.lm_head]
ENCODERS = [name for name, family in FAMILIES.items() if not family.lm_head]


def refusals(directory: Path) -> list[str]:
    """The refusals that `models add` would print."""
    return [f"{each.path}: {each.reason}" for each in check_model(directory) if each.is_refusal]


def refusal_of(
    directory: Path,
    change: Callable[[Shapes], Shapes],
    model_type: str = "llama",
    engine: EngineKind = "transformers",
    **values: Any,
) -> str:
    """The one refusal of a checkpoint whose tensors were changed; of none an empty text."""
    config = config_of(model_type, engine, **values)
    shapes = change(shapes_of(config, engine))
    return "\n".join(refusals(write_model(directory, config, shapes, engine)))


def without(part: str) -> Callable[[Shapes], Shapes]:
    return lambda shapes: {name: shape for name, shape in shapes.items() if part not in name}


def renamed(rename: Callable[[str], str]) -> Callable[[Shapes], Shapes]:
    return lambda shapes: {rename(name): shape for name, shape in shapes.items()}


@pytest.mark.parametrize("model_type", DECODERS)
@pytest.mark.parametrize("engine", ["transformers", "classify", "embed"])
def test_a_whole_decoder_is_accepted(tmp_path: Path, model_type: str, engine: EngineKind) -> None:
    """Decoders may generate, encode sentences and, if transformers has the class, classify."""
    if engine == "classify" and not read_types()[model_type].classifies:
        config = config_of(model_type) | {"architectures": ["XForSequenceClassification"]}
        found = refusals(write_model(tmp_path, config, engine=engine))
        assert f"no sequence classifier of the type '{model_type}'" in found[0]
        return
    assert refusals(write_model(tmp_path, config_of(model_type, engine), engine=engine)) == []


@pytest.mark.parametrize("model_type", ENCODERS)
@pytest.mark.parametrize("engine", ["classify", "embed"])
def test_a_whole_encoder_is_accepted(tmp_path: Path, model_type: str, engine: EngineKind) -> None:
    """With the head that classifies, and without."""
    assert refusals(write_model(tmp_path, config_of(model_type, engine), engine=engine)) == []


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_tensor_is_missed(tmp_path: Path, model_type: str) -> None:
    """A missing tensor would be random numbers, other ones at each load."""
    engine: EngineKind = "transformers" if FAMILIES[model_type].lm_head else "classify"
    config = config_of(model_type, engine, tie_word_embeddings=False)
    shapes = shapes_of(config, engine)
    write_model(tmp_path, config, shapes, engine)
    for name in (each for each in shapes if ".experts." not in each):
        rest = {other: shape for other, shape in shapes.items() if other != name}
        write_safetensors(tmp_path / "model.safetensors", rest)
        (found,) = refusals(tmp_path)
        assert name in found


@pytest.mark.parametrize(
    ("values", "part", "message"),
    [
        ({"num_hidden_layers": 4}, "layers.3.", "num_hidden_layers is 4, but layer 3 is in no"),
        ({}, "layers.1.", "num_hidden_layers is 3, but layer 1 is in no file"),
        ({"num_hidden_layers": 9}, "layers.", "no file"),
    ],
)
def test_layers_that_are_missing_are_named(
    tmp_path: Path, values: dict[str, Any], part: str, message: str
) -> None:
    """At the end, in the middle, all of them."""
    assert message in refusal_of(tmp_path, without(part), **values)


def test_a_shortened_configuration_is_refused(tmp_path: Path) -> None:
    """The files of another model: it would run without its last layers."""
    config = config_of("llama", num_hidden_layers=2)
    write_model(tmp_path, config, shapes_of(config_of("llama", num_hidden_layers=5)))
    (found,) = refusals(tmp_path)
    assert "num_hidden_layers is 2, but the files have layers 2 to 4, too" in found


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    """By config.json or, where that says nothing, by its class."""
    assert "tie_word_embeddings is false" in refusal_of(tmp_path, without("lm_head"))
    assert refusal_of(tmp_path, without("lm_head"), "gemma") == ""
    assert refusal_of(tmp_path, without("lm_head"), tie_word_embeddings=True) == ""
    found = refusal_of(tmp_path, without("lm_head"), "gemma", tie_word_embeddings=False)
    assert "lm_head.weight is in no file" in found


def test_a_tied_model_may_have_either_half(tmp_path: Path) -> None:
    """transformers ties them whichever is there; one must be."""
    assert refusal_of(tmp_path, without("embed_tokens"), tie_word_embeddings=True) == ""
    both = refusal_of(tmp_path, lambda s: without("lm_head")(without("embed_tokens")(s)), "gemma")
    assert "model.embed_tokens.weight" in both


def test_a_classifier_needs_its_head(tmp_path: Path) -> None:
    """The scores would be random; so would those of a pooler before it."""
    for model_type, head in (("bert", "classifier"), ("bert", "pooler"), ("roberta", "out_proj")):
        assert head in refusal_of(tmp_path, without(head), model_type, "classify")
    assert "score.weight" in refusal_of(tmp_path, without("score"), "qwen3", "classify")


def test_an_encoder_may_be_without_what_it_does_not_use(tmp_path: Path) -> None:
    """Sentence encoders are saved with a pooler or without, with a head for masks or without."""
    with_pooler = {"pooler.dense.weight": (8, 8), "cls.predictions.bias": (32,)}
    assert refusal_of(tmp_path, lambda shapes: shapes | with_pooler, "bert", "embed") == ""
    assert "layer 1 is in no file" in refusal_of(tmp_path, without("layer.1."), "bert", "embed")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "wrapped.", "model.model.", "base."])
def test_foreign_names_are_refused(tmp_path: Path, prefix: str) -> None:
    """No tensor would be read, and every weight be random."""
    found = refusal_of(tmp_path, renamed(lambda name: prefix + name))
    assert "*.safetensors" in found
    assert prefix in found


def test_names_of_another_family_are_refused(tmp_path: Path) -> None:
    """GPT-2's names under a Llama's config.json."""
    shapes = shapes_of(config_of("gpt2"))
    assert "no tensor has a name of the model" in refusal_of(tmp_path, lambda _: shapes)


def test_a_wrapper_is_seen_in_families_that_are_not_known(tmp_path: Path) -> None:
    """No model of transformers begins with these."""
    other = config_of("llama") | {"model_type": "arcee"}
    write_model(tmp_path, other, {"module.a.weight": (2, 2)})
    assert "without the prefix 'module.'" in refusals(tmp_path)[0]
    write_model(tmp_path, other, {"a.weight": (2, 2)})
    assert refusals(tmp_path) == []


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt2", "gpt_neox"])
def test_names_may_be_without_the_base_models_prefix(tmp_path: Path, model_type: str) -> None:
    """As base models are saved; transformers adds it."""
    prefix = FAMILIES[model_type].prefix + "."
    change = renamed(lambda name: name.removeprefix(prefix))
    assert refusal_of(tmp_path, change, model_type, "classify") == ""


def test_older_names_are_those_of_today(tmp_path: Path) -> None:
    """BERT's norms, GPT-NeoX's head and Mixtral's experts had others."""
    gamma = renamed(
        lambda n: n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
    )
    assert refusal_of(tmp_path, gamma, "bert", "embed") == ""
    head = renamed(lambda name: name.replace("lm_head", "embed_out"))
    assert refusal_of(tmp_path, head, "gpt_neox") == ""
    blocks = renamed(lambda name: name.replace(".mlp.", ".block_sparse_moe."))
    assert refusal_of(tmp_path, blocks, "mixtral") == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 40}, "has the shape [32, 8], config.json asks for [40, 8]"),
        ({"hidden_size": 16}, "[32, 16]"),
        ({"num_key_value_heads": 2}, "self_attn.k_proj.weight has the shape [4, 8]"),
        ({"num_attention_heads": 4}, "self_attn.o_proj.weight has the shape [8, 8]"),
        ({"head_dim": 8}, "self_attn"),
        ({"intermediate_size": 24}, "config.json asks for [8, 24]"),
    ],
)  # fmt: skip
def test_a_size_of_another_model_is_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    """The numbers of both are in the message."""
    lm_head = {"lm_head.weight": (values.get("vocab_size", 32), values.get("hidden_size", 8))}
    shapes = shapes_of(config_of("llama")) | lm_head
    assert message in refusal_of(tmp_path, lambda _: shapes, **values)


def test_a_size_that_config_json_does_not_tell_is_the_classs_default(tmp_path: Path) -> None:
    """Mistral's is 8 heads of keys and values; without one in the class, any size fits."""
    config = config_of("mistral", num_key_value_heads=8, num_attention_heads=8)
    shapes, left_out = shapes_of(config), {"num_key_value_heads"}
    write_model(tmp_path, {k: v for k, v in config.items() if k not in left_out}, shapes)
    assert refusals(tmp_path) == []
    other = shapes_of(config | {"num_key_value_heads": 4})
    write_model(tmp_path, {k: v for k, v in config.items() if k not in left_out}, other)
    assert (
        "k_proj.weight has the shape [16, 8], config.json asks for [32, 8]" in refusals(tmp_path)[0]
    )


def test_a_key_may_have_the_name_that_most_types_have_for_it(tmp_path: Path) -> None:
    """transformers translates GPT-2's `hidden_size` to `n_embd`, and so on."""
    config = config_of("gpt2")
    assert refusals(write_model(tmp_path, config)) == []
    own = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    renamed_keys = {own.get(key, key): value for key, value in config.items()}
    assert refusals(write_model(tmp_path, renamed_keys, shapes_of(config))) == []


def test_a_bias_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    """Qwen's files under a Llama's config.json: tokens would be wrong, without an error."""
    qwen = shapes_of(config_of("qwen2"))
    directory = write_model(tmp_path, config_of("llama"), qwen)
    assert refusals(directory) == []  # zeros change nothing
    write_safetensors(directory / "model.safetensors", qwen, fill=b"\1")
    (found,) = refusals(directory)
    assert "model.layers.0.self_attn.k_proj.bias" in found
    assert "and 6 more" in found


def test_what_older_releases_saved_is_no_fault(tmp_path: Path) -> None:
    """Frequencies and masks, which newer releases compute."""
    old: Shapes = {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    assert refusal_of(tmp_path, lambda shapes: shapes | old) == ""
    config = config_of("gpt2")
    old = {"h.0.attn.bias": (1, 1, 4, 4), "h.0.attn.masked_bias": ()}
    directory = write_model(tmp_path, config)
    write_safetensors(directory / "model.safetensors", shapes_of(config) | old, fill=b"\1")
    assert refusals(directory) == []


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """Experts lie in the file one by one, or all in one tensor."""
    numbers = [(layer, expert) for layer in range(3) for expert in range(2)]
    parts = {f"model.layers.{n}.mlp.experts.{e}.down_proj.weight": (8, 4) for n, e in numbers}
    assert refusal_of(tmp_path, lambda shapes: shapes | parts, "qwen3_moe") == ""
    del parts["model.layers.1.mlp.experts.1.down_proj.weight"]
    found = refusal_of(tmp_path, lambda shapes: shapes | parts, "qwen3_moe")
    assert "model.layers.1.mlp.experts.1.down_proj.weight is in no file" in found
    fused = {"model.layers.0.mlp.experts.down_proj": (2, 8, 4)}
    assert refusal_of(tmp_path, lambda shapes: shapes | fused, "qwen3_moe") == ""


def test_a_router_without_experts_is_refused(tmp_path: Path) -> None:
    """Experts have many forms, but some are there where a router chooses among them."""
    found = refusal_of(tmp_path, without(".experts."), "mixtral")
    assert "model.layers.0.mlp has a router and no experts" in found


def test_a_model_that_was_part_of_another_is_accepted(tmp_path: Path) -> None:
    """transformers drops the prefix of the base model, also before that of the model itself."""
    assert refusal_of(tmp_path, renamed(lambda name: f"model.{name}")) == ""


def test_a_number_in_quotes_is_refused(tmp_path: Path) -> None:
    """transformers takes none; the check would take it for a key that is left out."""
    found = refusal_of(tmp_path, lambda shapes: shapes, num_hidden_layers="3")
    assert "num_hidden_layers '3': write the number without quotes" in found


def test_json_in_another_encoding_is_refused(tmp_path: Path) -> None:
    """transformers reads UTF-8 alone."""
    write_model(tmp_path, config_of("llama"))
    file = tmp_path / "config.json"
    file.write_bytes(file.read_text().encode("utf-16"))
    assert "config.json: is not JSON ('utf-8' codec" in refusals(tmp_path)[0]


def test_settings_of_generation_that_are_left_out_are_warned_of(tmp_path: Path) -> None:
    """`generate` would answer otherwise with them; those that change nothing are passed over."""
    write_model(tmp_path, config_of("llama"))
    settings = {"num_beams": 4, "bad_words_ids": [[5]], "typical_p": 1.0, "max_length": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    (found,) = check_model(tmp_path)
    assert (found.path, found.is_refusal) == ("generation_config.json", False)
    assert found.reason == "has num_beams, bad_words_ids, which are left out, as in vLLM"
