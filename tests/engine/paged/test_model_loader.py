"""Loading: what cannot run is refused by name, what can is ready."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from gpu_worker.engines.checkpoints.loading import UnsupportedModel
from gpu_worker.engines.factory import build
from gpu_worker.engines.paged.attention.paged_attention import KvLayerSpec
from gpu_worker.engines.paged.model_loader import (
    check_architecture,
    inspect_model,
    load_model,
    max_kv_tokens,
)
from gpu_worker.engines.paged.weights.linear_layers import GatedMLP, merge_and_pack
from tests.engine.tiny_models import (
    ARCHITECTURES,
    CONTEXT,
    DYNAMIC,
    GROUPED,
    SHAPE,
    expected,
    greedy_sequence,
    load_tiny_model,
    model,
    prompt,
    run_to_end,
    save,
    tokenizer,
)

CONFIGS: dict[str, tuple[PreTrainedConfig, str]] = {
    "gemma2": (Gemma2Config(**GROUPED), "soft-capped attention"),
    "deepseek_v3": (DeepseekV3Config(**SHAPE), "multi-head latent attention"),
    "t5": (T5Config(), "an encoder and a decoder"),
    "llama4_text": (Llama4TextConfig(**GROUPED), "chunked_attention"),
    "lfm2": (Lfm2Config(**SHAPE, full_attn_idxs=[1]), "layers of type conv"),
    "mamba": (MambaConfig(), "linear_attention"),
    "phi3": (
        Phi3Config(
            **GROUPED,
            rope_parameters={
                "rope_type": "longrope",
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
                "original_max_position_embeddings": 32,
                "factor": 2.0,
            },
        ),
        "rotary embeddings that depend on the longest sequence",
    ),
}

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}
MODELS: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig, str]] = {
    "BertLMHeadModel": (
        BertLMHeadModel,
        BertConfig(**SMALL, num_hidden_layers=2, intermediate_size=16),
        "bidirectional attention",
    ),
    "BloomForCausalLM": (
        BloomForCausalLM,
        BloomConfig(**SMALL, n_layer=2),
        "attention cannot be replaced",
    ),
    "GptOssForCausalLM": (
        GptOssForCausalLM,
        GptOssConfig(**GROUPED, num_local_experts=2, layer_types=["full_attention"] * 3),
        "attention sinks",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unfit_configuration_is_refused_by_name(name: str) -> None:
    """Before the weights are read, which may take minutes."""
    config, reason = CONFIGS[name]
    with pytest.raises(UnsupportedModel, match=f"{name} .*{reason}"):
        check_architecture(config)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_configuration_does_not_tell_is_found_out(name: str) -> None:
    """Wrong text would otherwise be the first sign."""
    kind, config, reason = MODELS[name]
    with pytest.raises(UnsupportedModel, match=f"{name} .*{reason}"):
        inspect_model(kind(config).train(False), tokenizer())


def test_a_directory_of_an_unfit_model_is_refused_without_its_weights(tmp_path: Path) -> None:
    """The name in the message is the architecture's."""
    config = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="Gemma2ForCausalLM"):
        build("transformers", tmp_path, {})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model("llama"), tmp_path_factory.mktemp("llama"))


def test_a_loaded_directory_is_warm_empty_and_right(directory: Path) -> None:
    """The warm-up leaves nothing behind: no cached prefix, no room taken."""
    options: dict[str, float | int | str] = {"max_sequences": 4, "kv_tokens": 1024, "device": "cpu"}
    made = build("transformers", directory, options)
    assert (made.free_capacity().sequences, made.free_capacity().tokens) == (4, 1024)
    assert made.idle
    results = run_to_end(made, [greedy_sequence("a", prompt(1, 20), 10)])
    assert results.tokens["a"] == expected("llama", prompt(1, 20), 10)


def test_packed_weights_round_no_worse(tmp_path: Path) -> None:
    """A bfloat16 model on a CPU runs on weights in oneDNN's own order, its MLPs as a whole."""
    plain = model("llama").to(torch.bfloat16)  # type: ignore[arg-type]
    save(plain, tmp_path)
    packed = load_model(tmp_path, "cpu").model
    packed.set_attn_implementation("sdpa")
    assert any(isinstance(module, GatedMLP) for module in packed.modules())
    ids = torch.tensor([prompt(1, 40)])
    with torch.inference_mode():
        rounded, ours = plain(input_ids=ids).logits, packed(input_ids=ids).logits
        exact = plain.float()(input_ids=ids).logits
    assert (ours - exact).abs().mean() < 1.1 * (rounded - exact).abs().mean()


class ClampedMLP(LlamaMLP):
    """As in several models: the same layers, and one operation more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(self.gate_proj(x)).clamp(max=7.0)
        return self.down_proj(gate * self.up_proj(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "packed"), [(LlamaMLP, True), (ClampedMLP, False)])
def test_an_mlp_that_does_more_is_left_as_it_is(kind: type[LlamaMLP], packed: bool) -> None:
    """Its layers have the usual names, but to fuse them would leave out what lies between."""
    holder = torch.nn.Sequential(kind(model("llama").config))
    merge_and_pack(holder)
    assert isinstance(holder[0], GatedMLP) == packed


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_survey_sees_the_kv_of_each_layer(architecture: str) -> None:
    """KV is sized by what layers do, not by what a configuration calls it."""
    heads = 4 if architecture == "gpt_neox" else 2
    dim = 12 if architecture == "gpt_neox" else 16
    found = load_tiny_model(architecture)
    sliding: dict[str, list[int | None]] = {"gemma3": [20, None, 20], "mistral": [24] * 3}
    windows = sliding.get(architecture, [None] * 3)
    assert found.kv_layers == [KvLayerSpec(heads, dim, window) for window in windows]
    assert found.context_length == CONTEXT


@pytest.mark.parametrize("layer", [None, "full_attention"])
def test_no_pass_asks_whether_its_positions_need_other_frequencies(layer: str | None) -> None:
    """Within the context none does, and a GPU would be waited for, which no recording may."""
    config, kind = ARCHITECTURES["gemma3" if layer else "llama"]
    made = config()
    made.rope_parameters = dict.fromkeys(made.layer_types, DYNAMIC) if layer else DYNAMIC
    rotary = inspect_model(kind(made), tokenizer()).model.model.rotary_emb
    before, far = dict(rotary.named_buffers()), torch.tensor([[2 * rotary.max_seq_len_cached]])
    rotary(torch.zeros(1), far, **({"layer_type": layer} if layer else {}))
    after = dict(rotary.named_buffers())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_kv_is_never_more_than_could_be_used() -> None:
    """A tiny model takes little of a large machine."""
    assert max_kv_tokens(load_tiny_model("llama"), 2, 512, 1 << 40) == 2 * CONTEXT


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_is_left_to_the_reader_is_the_weights_own(tmp_path: Path, key: str) -> None:
    """Some directories have `auto` there, at which transformers alone fails."""
    save(model("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    own = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps({**config, key: "auto"}))
    assert str(load_model(tmp_path, "cpu").model.dtype) == f"torch.{own}"
