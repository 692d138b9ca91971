"""Random LoRA adapters of the tiny models, saved by peft, and what peft makes of a prompt."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from gpu_worker.engines.engine import Sequence
from registry.lora_inspection import adapter_from
from registry.models import Model, Version
from streams.messages import AdapterRef, Sampling
from tests.engine import tiny_models
from tests.support.versions import make_version

BASE = make_version(context_length=tiny_models.CONTEXT, vocab_size=tiny_models.VOCABULARY)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def base(version: Version = BASE) -> Model:
    """The record of a tiny model."""
    return Model(
        name="base",
        engine="transformers",
        versions={version.id: version},
        default_version=version.id,
    )


def save_adapter(directory: Path, architecture: str, seed: int, rank: int, **options: Any) -> Path:
    """A directory as peft saves it, with weights that change what the model says."""
    model = tiny_models.model(architecture)
    torch.manual_seed(seed)
    wanted = {"r": rank, "lora_alpha": 2 * rank, "target_modules": ATTENTION, **options}
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **wanted)
    with _without_warnings():
        get_peft_model(model, config).save_pretrained(str(directory))
    return directory


@contextmanager
def _without_warnings() -> Iterator[None]:
    """peft 0.21 reads attributes that transformers 5.23 calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def reference(directory: Path, name: str) -> AdapterRef:
    """What a request carries of a saved adapter."""
    return adapter_from(directory, name, base(), BASE).ref


def greedy_sequence(
    request_id: str, ids: list[int], count: int, adapter: AdapterRef | None
) -> Sequence:
    """A greedy sequence."""
    return Sequence(request_id, ids, Sampling(max_tokens=count, temperature=0), adapter=adapter)


@cache
def _peft(architecture: str, directory: str) -> PeftModel:
    with _without_warnings():
        return PeftModel.from_pretrained(tiny_models.model(architecture), directory)


def expected(
    architecture: str, adapter: AdapterRef | None, ids: list[int], count: int
) -> list[int]:
    """What peft's `generate` makes of a prompt, greedily."""
    if adapter is None:
        return tiny_models.expected(architecture, ids, count)
    return _expected(architecture, adapter.directory, tuple(ids), count)


@cache
def _expected(architecture: str, directory: str, ids: tuple[int, ...], count: int) -> list[int]:
    out = _peft(architecture, directory).generate(  # type: ignore[no-untyped-call]
        input_ids=torch.tensor([ids]), max_new_tokens=count, do_sample=False
    )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


@torch.inference_mode()
def logprob(architecture: str, adapter: AdapterRef | None, ids: list[int]) -> float:
    """The log probability of the likeliest next token."""
    model = (
        _peft(architecture, adapter.directory) if adapter else tiny_models.reference(architecture)
    )
    logits: torch.Tensor = model(torch.tensor([ids])).logits
    return float(logits[0, -1].log_softmax(-1).max())
