"""Tiny random models of several architectures, and ways to drive an engine over them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gpu_worker.engines.engine import Engine, Output, Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model_loader import LoadedCausalLM, inspect_model
from gpu_worker.engines.paged.weights.linear_layers import merge_and_pack
from streams.messages import Sampling

VOCABULARY = 256
CONTEXT = 256
END = 0

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # spread logits: greedy choices are clear, and change
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 2,
}
GROUPED: dict[str, Any] = SHAPE | {"num_key_value_heads": 2, "head_dim": 16}

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}


def _gemma3() -> PreTrainedConfig:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(**GROUPED, sliding_window=20, layer_types=kinds)


ARCHITECTURES: dict[str, tuple[Callable[[], PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (lambda: LlamaConfig(**GROUPED), LlamaForCausalLM),
    "llama, dynamic RoPE": (
        lambda: LlamaConfig(**GROUPED, rope_parameters=DYNAMIC),
        LlamaForCausalLM,
    ),
    "qwen3": (lambda: Qwen3Config(**GROUPED), Qwen3ForCausalLM),
    "gemma3": (_gemma3, Gemma3ForCausalLM),
    "mistral": (lambda: MistralConfig(**GROUPED, sliding_window=24), MistralForCausalLM),
    "qwen2": (lambda: Qwen2Config(**GROUPED), Qwen2ForCausalLM),
    "phi3": (lambda: Phi3Config(**GROUPED), Phi3ForCausalLM),
    "gpt_neox": (lambda: GPTNeoXConfig(**SHAPE), GPTNeoXForCausalLM),
}


@cache
def tokenizer() -> Tokenizer:
    """Bytes: every id below 256 is one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({char: number for number, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def model(architecture: str) -> PreTrainedModel:
    """The same random weights at each call."""
    config, kind = ARCHITECTURES[architecture]
    torch.manual_seed(7)
    made = kind(config())
    made.train(False)
    return made


def save(made: PreTrainedModel, directory: Path) -> Path:
    """Save a model with the tokeniser of bytes, and return the directory."""
    made.save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@cache
def reference(architecture: str) -> PreTrainedModel:
    """A model for `generate`, which no engine touches."""
    return model(architecture)


def load_tiny_model(architecture: str) -> LoadedCausalLM:
    made = model(architecture)
    merge_and_pack(made)
    return inspect_model(made, tokenizer())


def engine(
    architecture: str = "llama",
    *,
    max_sequences: int = 8,
    max_batch_tokens: int = 512,
    kv_tokens: int = 2048,
    prefix_cache: bool = True,
) -> TransformersEngine:
    return TransformersEngine(
        load_tiny_model(architecture), max_sequences, max_batch_tokens, kv_tokens, prefix_cache
    )


def prompt(number: int, length: int) -> list[int]:
    """Pseudo-random ids, without the ones of special meaning."""
    generator = torch.Generator().manual_seed(number)
    ids: list[int] = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
    return ids


@cache
def _expected(architecture: str, ids: tuple[int, ...], count: int) -> list[int]:
    out = reference(architecture).generate(  # type: ignore[operator]
        torch.tensor([ids]), max_new_tokens=count, do_sample=False
    )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def expected(architecture: str, ids: list[int], count: int) -> list[int]:
    """What `generate` makes of a prompt, greedily."""
    return _expected(architecture, tuple(ids), count)


def greedy_sequence(request_id: str, ids: list[int], count: int) -> Sequence:
    return Sequence(request_id, ids, Sampling(max_tokens=count, temperature=0))


class Results:
    """Outputs put together by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.terminals: dict[str, Output] = {}

    def add(self, outputs: list[Output]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.terminals, f"{name} goes on after its end"
            self.tokens.setdefault(name, []).extend(output.tokens)
            self.text[name] = self.text.get(name, "") + output.text
            if output.finish or output.error:
                self.terminals[name] = output


def run_to_end(engine: Engine, sequences: list[Sequence], every: int = 0) -> Results:
    """Run sequences to their ends; a new one joins after each `every` steps (0: all at once)."""
    results, queue, steps = Results(), list(sequences), 0
    while queue or not engine.idle:
        while queue and (not every or steps % every == 0):
            engine.add(queue.pop(0))
            if every:
                break
        results.add(engine.step())
        steps += 1
        assert steps < 5000, "the engine makes no progress"
    return results
