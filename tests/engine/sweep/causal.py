"""Serves every causal model of transformers, tiny and random, and compares it with `generate`."""

import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from gpu_worker.engines.checkpoints.loading import UnsupportedModel
from gpu_worker.engines.engine import Engine
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model_loader import check_supported, load_model
from registry.artifact_verification import read_json_object
from registry.checkpoints.model_types import classes_run, declared_reasons
from registry.model_inspection import check_model
from registry.models import EngineKind
from tests.engine.sweep.tiny_configs import tiny_config
from tests.engine.tiny_models import greedy_sequence, prompt, run_to_end, save

LENGTHS = (1, 5, 33, 70)  # of prompts; the longest is more than one window and several steps
COUNT = 12
SETTINGS = ((8, 512), (8, 13))  # sequences and tokens of a step: whole, and in chunks
LIMIT_SECONDS = 300  # for one architecture
TIE = 1e-3  # of the range of logits: closer ones are not told apart


@dataclass(frozen=True)
class Result:
    """The outcome of one architecture.

    `outcome` is "equal", "refused", "wrong", or "not built"; `reason` says why, empty if equal.
    `is_declared`: config.json and the table of types say so, too.
    """

    architecture: str
    outcome: str
    reason: str = ""
    is_declared: bool = False


def sweep(only: set[str]) -> Iterator[Result]:
    """Yield the result of each architecture, or of those named in `only`, one after the other."""
    for kind in dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING):
        name = model_class(MODEL_FOR_CAUSAL_LM_MAPPING, kind).__name__
        if not only or name in only:
            with tempfile.TemporaryDirectory() as directory, time_limit(LIMIT_SECONDS):
                result = try_architecture(name, kind, Path(directory))
                yield compare_with_registration(
                    result, Path(directory), "transformers", kind.model_type
                )


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer; in a process's main thread only."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"takes longer than {seconds} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def try_architecture(name: str, kind: type[PreTrainedConfig], directory: Path) -> Result:
    """Build a model in an empty directory, serve it, and compare."""
    try:
        plain = save_random(kind, directory)
        wanted = [generate(plain, prompt(n, length)) for n, length in enumerate(LENGTHS)]
    except Exception as error:
        return _refused_or_not_built(name, directory, error)
    try:
        for sequences, tokens in SETTINGS:
            engine = TransformersEngine(load_model(directory, "cpu"), sequences, tokens, 2048)
            engine.warm_up()
            if reason := find_difference(engine, plain, wanted):
                return Result(name, "wrong", f"{reason} (steps of {tokens} tokens)")
    except UnsupportedModel as error:
        return Result(name, "refused", str(error))
    except Exception as error:
        return Result(name, "wrong", f"{type(error).__name__}: {error}")
    return Result(name, "equal")


def compare_with_registration(
    result: Result, directory: Path, engine: EngineKind, model_type: str
) -> Result:
    """Return a result with what `models add` says; a wrong one if it says otherwise than a worker.

    What it accepts although a worker refuses it gets into refused_architectures.json, by which it
    refuses it, too. `model_type` is that of a whole model, of which the directory may have a part.
    """
    if result.outcome == "refused":
        config = read_json_object(directory / "config.json") | {"model_type": model_type}
        if any(declared_reasons(config, engine)):
            return replace(result, is_declared=True)
        if result.architecture in classes_run(config, engine):
            return result
        return replace(result, outcome="wrong", reason=f"models add accepts it: {result.reason}")
    refusals = [each.reason for each in check_model(directory) if each.is_refusal]
    if result.outcome == "equal" and refusals:
        return replace(result, outcome="wrong", reason=f"models add refuses it: {refusals[0]}")
    return result


def save_random(kind: type[PreTrainedConfig], directory: Path) -> PreTrainedModel:
    """Save a tiny model with random weights and a tokeniser; return it, loaded from there."""
    torch.manual_seed(7)
    config = tiny_config(kind)
    config.save_pretrained(directory)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.2)
    save(model, directory)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    loaded.train(False)
    return loaded


def generate(model: PreTrainedModel, ids: list[int]) -> list[int]:
    """Return what `generate` makes of a prompt, greedily."""
    out = model.generate(  # type: ignore[operator]
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=COUNT,
        do_sample=False,
    )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def find_difference(engine: Engine, plain: PreTrainedModel, wanted: list[list[int]]) -> str | None:
    """Return where an engine's tokens differ from the wanted ones other than by a tie; or None."""
    prompts = [prompt(n, length) for n, length in enumerate(LENGTHS)]
    sequences = [greedy_sequence(str(n), ids, COUNT) for n, ids in enumerate(prompts)]
    results = run_to_end(engine, sequences)
    for n, ids in enumerate(prompts):
        if error := results.terminals[str(n)].error:
            return f"a prompt of {len(ids)} tokens fails: {error}"
        got = results.tokens[str(n)]
        if got != wanted[n] and not _is_tie(plain, ids, got, wanted[n]):
            return f"a prompt of {len(ids)} tokens gets {got[:4]}, generate has {wanted[n][:4]}"
    return None


def _is_tie(plain: PreTrainedModel, ids: list[int], got: list[int], wanted: list[int]) -> bool:
    same = next((n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
    if same is None:
        return False
    with torch.inference_mode():
        logits = plain(input_ids=torch.tensor([ids + wanted[:same]]), use_cache=False).logits[0, -1]
    gap = (logits[wanted[same]] - logits[got[same]]).abs()
    return bool(gap < TIE * (logits.max() - logits.min()))


def _refused_or_not_built(name: str, directory: Path, error: Exception) -> Result:
    """Return that the configuration is refused, if it is, where plain transformers already fails.

    An architecture that cannot be tried here may still be one that the engine refuses.
    """
    if (directory / "config.json").exists():
        with suppress(OSError, ValueError, KeyError):
            try:
                check_supported(directory, "cpu", 1)
            except UnsupportedModel as refusal:
                return Result(name, "refused", str(refusal))
    return Result(name, "not built", f"{type(error).__name__}: {error}")


def model_class(mapping: Mapping[Any, Any], kind: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return the class that transformers makes of a configuration, by one of its mappings."""
    found = mapping[kind]
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]
