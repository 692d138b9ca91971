"""A model is proven before it serves: the engine must compute what transformers computes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
)

from gpu_worker.engines.checkpoints.loading import UnsupportedModel
from gpu_worker.engines.factory import build
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model_loader import load_model
from gpu_worker.engines.paged.proof import ForcedText, Reference, check_computed
from gpu_worker.engines.paged.weights.linear_layers import MergedLinearPart, PackedLinear
from streams.messages import Logprob
from tests.engine.tiny_models import (
    GROUPED,
    SHAPE,
    expected,
    greedy_sequence,
    model,
    prompt,
    run_to_end,
    save,
)

DTYPES = (torch.float32, torch.bfloat16)


def made_engine(directory: Path, tokens: int = 512) -> TransformersEngine:
    engine = TransformersEngine(load_model(directory, "cpu"), 4, tokens, 1024)
    engine.warm_up()
    return engine


def shifted_part(part: MergedLinearPart, rows: torch.Tensor) -> torch.Tensor:
    """The output of a layer that is taken for its neighbour."""
    out: torch.Tensor = part.merged_layer(rows)
    first = part.first_column + 1
    return out.roll(-first, -1)[..., : part.out_features]


def swapped_layer(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
    """A layer whose outputs come in another order."""
    return layer.forward_activated(rows, "none", "").flip(-1)


FAULTS: dict[str, tuple[type[torch.nn.Module], Callable[..., torch.Tensor]]] = {
    "columns": (MergedLinearPart, shifted_part),
    "order": (PackedLinear, swapped_layer),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that_computes_something_else_does_not_serve(
    fault: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the fault, its model is refused by name and the way out is said."""
    kind, forward = FAULTS[fault]
    save(model("llama").to(dtype), tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .*log probabilities.*vLLM"):
        made_engine(tmp_path)


def test_positions_that_the_model_ignores_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in one piece a prompt would be right; a chunk behind another is not."""

    class CountsItself(LlamaForCausalLM):  # type: ignore[no-untyped-call]
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options | {"position_ids": None})

    save(model("llama"), tmp_path)
    monkeypatch.setattr(
        "gpu_worker.engines.paged.model_loader.AutoModelForCausalLM.from_pretrained",
        CountsItself.from_pretrained,
    )
    with pytest.raises(UnsupportedModel, match="computed together"):
        made_engine(tmp_path)


def test_a_proof_is_made_once_for_each_setting(tmp_path: Path) -> None:
    """A model that returns to memory is not proven again."""
    save(model("llama"), tmp_path)
    asked: list[str] = []
    kept: list[str] = []

    def is_proven(setting: str) -> bool:
        asked.append(setting)
        return setting in kept

    options: dict[str, Any] = {"kv_tokens": 1024, "device": "cpu", "is_proven": is_proven}
    for _ in range(2):
        build("transformers", tmp_path, options | {"keep_proof": kept.append})
    assert len(asked) == 2
    assert kept == asked[:1]
    assert re.fullmatch(
        r"torch\.float32, cpu, \w+, torch .*, transformers .*, millstream .*", kept[0]
    )


def test_the_proof_leaves_nothing_behind(tmp_path: Path) -> None:
    """No cached prefix, no lowered budget, no counted token."""
    save(model("gemma3"), tmp_path)
    engine = made_engine(tmp_path)
    assert (engine.idle, engine.stats.generated, engine.stats.kv_cached) == (True, 0, 0)
    assert engine.concurrency_limit() == 4
    results = run_to_end(engine, [greedy_sequence("a", prompt(1, 40), 10)])
    assert results.tokens["a"] == expected("gemma3", prompt(1, 40), 10)


@pytest.mark.parametrize("context", [8, 16])
def test_a_short_context_is_proven_with_shorter_texts(context: int, tmp_path: Path) -> None:
    """The texts of the proof must not be what makes a small model fail."""
    config = LlamaConfig(**GROUPED | {"max_position_embeddings": context})
    save(LlamaForCausalLM(config), tmp_path)
    assert made_engine(tmp_path).idle


EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_topk": 2,
    "num_experts_per_tok": 2,
}
RIGHT: dict[str, Callable[[], PreTrainedModel]] = {
    "a router whose weight the model reads": lambda: HunYuanMoEV1ForCausalLM(
        HunYuanMoEV1Config(**GROUPED, **EXPERTS)
    ),
    "a window that only the mask has": lambda: PhimoeForCausalLM(
        PhimoeConfig(**GROUPED, **EXPERTS, sliding_window=20)
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_once_was_wrong_is_now_served_right(name: str, tmp_path: Path) -> None:
    """Prompts longer than a window and than a step, against `generate`."""
    torch.manual_seed(7)
    made = RIGHT[name]().eval()  # type: ignore[no-untyped-call]
    engine = made_engine(save(made, tmp_path), 13)
    ids = [prompt(n, length) for n, length in enumerate((5, 33, 70))]
    results = run_to_end(engine, [greedy_sequence(str(n), each, 8) for n, each in enumerate(ids)])
    for n, each in enumerate(ids):
        wanted = made.generate(torch.tensor([each]), max_new_tokens=8, do_sample=False)
        assert results.tokens[str(n)] == wanted[0, len(each) :].tolist()


BART = BartConfig(
    vocab_size=256, d_model=32, decoder_layers=2, encoder_layers=2, decoder_attention_heads=2,
    encoder_attention_heads=2, decoder_ffn_dim=48, encoder_ffn_dim=48, max_position_embeddings=128,
    is_decoder=True, is_encoder_decoder=False, forced_eos_token_id=None,
)  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "BartForCausalLM": (lambda: BartForCausalLM(BART), "takes no positions"),
    "DiffLlamaForCausalLM": (
        lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**SHAPE)),
        "computed twice in a layer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_cannot_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Each gave wrong tokens in silence before."""
    make, reason = REFUSED[name]
    save(make(), tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{name} .*{reason}.*vLLM"):
        made_engine(tmp_path)


@pytest.mark.parametrize("may_flip", [False, True])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_in_half_precision_only_a_router_may_miss_one_position(wrong: int, may_flip: bool) -> None:
    """One position that is off is a wrong engine, unless rounding chose another expert there."""
    torch.manual_seed(wrong)
    rows = torch.randn(3, 40)
    texts = [ForcedText([1, 2], [3, 4, 5])]
    reference = Reference("Some", "", torch.bfloat16, may_flip, texts, [rows])
    computed = rows.clone()
    computed[wrong] = torch.randn(40)
    if may_flip:
        assert check_computed(reference, [likeliest(computed)], "together") == 0
        computed[wrong - 1] = torch.randn(40)
    with pytest.raises(UnsupportedModel, match="log probabilities are off"):
        check_computed(reference, [likeliest(computed)], "together")


def test_numbers_that_are_none_are_refused() -> None:
    rows = torch.randn(3, 40)
    reference = Reference("Some", "", torch.float32, False, [ForcedText([1], [2, 3, 4])], [rows])
    broken = rows.clone()
    broken[0, 7] = torch.nan
    with pytest.raises(UnsupportedModel, match="off by inf"):
        check_computed(reference, [likeliest(broken)], "alone")


def likeliest(rows: torch.Tensor) -> list[Logprob]:
    """The log probabilities that an engine gives of each position."""
    found = []
    for row in rows.log_softmax(-1):
        values, ids = row.topk(20)
        top = [(int(id), "", float(value)) for id, value in zip(ids, values, strict=True)]
        found.append(Logprob(top[0][0], "", top[0][2], top))
    return found


def test_a_model_in_double_precision_is_proven(tmp_path: Path) -> None:
    save(model("llama").to(torch.float64), tmp_path)  # type: ignore[arg-type]
    engine = made_engine(tmp_path)
    assert run_to_end(engine, [greedy_sequence("a", prompt(1, 40), 10)]).tokens["a"]


def test_an_adapter_beside_a_model_is_refused(tmp_path: Path) -> None:
    """transformers would merge it into the model where peft is installed, and nowhere else."""
    save(model("llama"), tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UnsupportedModel, match="adapter_config.json.*--adapter-of"):
        made_engine(tmp_path)
