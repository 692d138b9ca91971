"""LoRA adapters: what a sequence gets is peft's, whatever else is in its batch or was before."""

import re
import threading
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.model_loader import inspect_model
from gpu_worker.engines.paged.weights.linear_layers import merge_and_pack
from gpu_worker.engines.paged.weights.lora import LoraWeights, load_lora
from gpu_worker.models.record_checks import check_directory
from registry.destination_policy import DestinationPolicy
from streams.messages import AdapterRef, Sampling
from streams.subjects import Priority
from tests.engine import lora_adapters, tiny_models
from tests.engine.tiny_models import Results, prompt, run_to_end

COUNT = 12
ARCHITECTURES = ("llama", "gemma3", "qwen3")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where adapters are saved once for all tests."""
    return tmp_path_factory.mktemp("adapters")


@cache
def two(architecture: str, path: Path) -> tuple[AdapterRef, AdapterRef]:
    """Adapters of different ranks, scales and modules."""
    small = lora_adapters.save_adapter(path / architecture / "small", architecture, 1, rank=2)
    large = lora_adapters.save_adapter(
        path / architecture / "large",
        architecture,
        2,
        rank=8,
        target_modules="all-linear",
        use_rslora=True,
        rank_pattern={"q_proj": 3},
        alpha_pattern={"v_proj": 4},
    )
    return lora_adapters.reference(small, "small"), lora_adapters.reference(large, "large")


def mixed(used: list[AdapterRef | None]) -> list[Sequence]:
    """Prompts of several lengths for each adapter; requests are named after their prompts."""
    lengths = (1, 17, 40)
    return [
        lora_adapters.greedy_sequence(f"{n}-{k}", prompt(n, length), COUNT, adapter)
        for n, length in enumerate(lengths)
        for k, adapter in enumerate(used)
    ]


def assert_as_peft(results: Results, sequences: list[Sequence], architecture: str) -> None:
    for each in sequences:
        want = lora_adapters.expected(architecture, each.adapter, each.prompt, COUNT)
        assert results.tokens[each.request_id] == want, each.request_id


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [512, 13])
def test_a_mixed_batch_equals_peft(architecture: str, chunk: int, shelf: Path) -> None:
    """Base and two adapters share weights and batch; cutting prompts moves rows, not results."""
    sequences = mixed([None, *two(architecture, shelf)])
    made = tiny_models.engine(architecture, max_batch_tokens=chunk)
    assert_as_peft(run_to_end(made, sequences, every=2), sequences, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_are_pefts(architecture: str, shelf: Path) -> None:
    """Closer than greedy choices, which a weak adapter may leave as they are."""
    ids, sampling = prompt(1, 30), Sampling(max_tokens=1, temperature=0, logprobs=0)
    used = [None, *two(architecture, shelf)]
    sequences = [Sequence(f"r{n}", ids, sampling, adapter=each) for n, each in enumerate(used)]
    results = run_to_end(tiny_models.engine(architecture), sequences)
    found = [(results.terminals[each.request_id].logprobs or [])[0].logprob for each in sequences]
    wanted = [lora_adapters.logprob(architecture, each, ids) for each in used]
    assert found == pytest.approx(wanted, abs=1e-4)
    assert len({round(value, 3) for value in wanted}) == len(used)


def test_packed_layers_take_adapters(shelf: Path) -> None:
    """bfloat16 on a CPU: other modules do the work, and rounding is coarse."""
    model = tiny_models.model("llama").to(torch.bfloat16)  # type: ignore[arg-type]
    merge_and_pack(model)
    adapter, _ = two("llama", shelf)
    made = TransformersEngine(inspect_model(model, tiny_models.tokenizer()), 8, 64, 2048)
    ids, sampling = prompt(1, 30), Sampling(max_tokens=1, temperature=0, logprobs=0)
    sequences = [Sequence("r", ids, sampling, adapter=adapter), Sequence("base", ids, sampling)]
    results = run_to_end(made, sequences)
    for each in sequences:
        (found,) = results.terminals[each.request_id].logprobs or []
        assert found.logprob == pytest.approx(
            lora_adapters.logprob("llama", each.adapter, ids), abs=0.1
        )


def test_alone_equals_in_a_batch(shelf: Path) -> None:
    """Who else is in the batch is nobody's business."""
    sequences = mixed([None, *two("llama", shelf)])
    for each in sequences:
        made = tiny_models.engine()
        assert_as_peft(run_to_end(made, [each]), [each], "llama")


def test_a_resumed_sequence_keeps_its_adapter(shelf: Path) -> None:
    """The second attempt continues as the first would have."""
    adapter, _ = two("llama", shelf)
    ids, made = prompt(3, 20), tiny_models.engine()
    whole = lora_adapters.expected("llama", adapter, ids, COUNT)
    for cut in range(1, len(whole), 4):
        asked = lora_adapters.greedy_sequence(f"r{cut}", ids, COUNT, adapter)
        resumed = Sequence(asked.request_id, ids, asked.sampling, whole[:cut], adapter=adapter)
        assert run_to_end(made, [resumed]).tokens[f"r{cut}"] == whole[cut:]


def test_preemption_keeps_the_adapter(shelf: Path) -> None:
    """A sequence that gives way is computed again, with what it had."""
    sequences = mixed([None, *two("llama", shelf)])
    made = tiny_models.engine(kv_tokens=160)
    assert_as_peft(run_to_end(made, sequences), sequences, "llama")
    assert made.stats.preemptions > 0


def test_cached_prefixes_are_not_shared_between_adapters(shelf: Path) -> None:
    """The same tokens have another KV under another adapter."""
    made, ids = tiny_models.engine(), prompt(1, 80)
    for number, adapter in enumerate([None, *two("llama", shelf)]):
        first = lora_adapters.greedy_sequence(f"a{number}", ids, COUNT, adapter)
        assert_as_peft(run_to_end(made, [first]), [first], "llama")
        assert made.stats.hit_tokens == number * 64  # of earlier second rounds alone
        again = lora_adapters.greedy_sequence(f"b{number}", ids, COUNT, adapter)
        assert_as_peft(run_to_end(made, [again]), [again], "llama")


def test_an_adapter_is_loaded_once_for_all_who_ask(shelf: Path) -> None:
    """A burst of first requests must not read the same gigabytes a hundred times."""
    adapter, _ = two("llama", shelf)
    made = tiny_models.engine()
    run_to_end(
        made, [lora_adapters.greedy_sequence(f"r{n}", prompt(n, 9), 4, adapter) for n in range(6)]
    )
    assert made.stats.adapter_loads == 1


def bytes_of(*adapters: AdapterRef) -> int:
    return sum(adapter.parameters * 4 for adapter in adapters)


def engine_with(adapter_bytes: int) -> TransformersEngine:
    return TransformersEngine(
        tiny_models.load_tiny_model("llama"), 8, 512, 2048, adapter_bytes=adapter_bytes
    )


def test_the_least_recently_used_makes_room(shelf: Path) -> None:
    """Adapters beyond the budget take turns, and each comes back as it was."""
    small, large = two("llama", shelf)
    third = lora_adapters.reference(
        lora_adapters.save_adapter(shelf / "third", "llama", 3, rank=2), "third"
    )
    made = engine_with(bytes_of(small, large))
    loads = []
    for number, adapter in enumerate([small, large, small, third, small, large]):
        each = lora_adapters.greedy_sequence(f"r{number}", prompt(number, 9), COUNT, adapter)
        assert_as_peft(run_to_end(made, [each]), [each], "llama")
        loads.append(made.stats.adapter_loads)
    assert loads == [1, 2, 2, 3, 3, 4]


def test_an_adapter_in_use_stays_and_others_wait_for_its_room(shelf: Path) -> None:
    """Room for one at a time: everybody is served, by turns, and the base meanwhile."""
    small, large = two("llama", shelf)
    made = engine_with(max(bytes_of(small), bytes_of(large)))
    sequences = mixed([small, None, large])
    assert_as_peft(run_to_end(made, sequences), sequences, "llama")


def test_less_urgent_work_that_waits_for_room_holds_up_nobody_more_urgent(shelf: Path) -> None:
    """Its adapter comes once nobody runs with the one that is there."""
    small, large = two("llama", shelf)
    made = engine_with(max(bytes_of(small), bytes_of(large)))
    running = lora_adapters.greedy_sequence("running", prompt(1, 9), 4 * COUNT, small)
    made.add(running)
    results = Results()
    while "running" not in results.tokens:
        results.add(made.step())
    later = [
        replace(
            lora_adapters.greedy_sequence("batch", prompt(2, 9), COUNT, large),
            priority=Priority.BATCH,
        ),
        replace(
            lora_adapters.greedy_sequence("urgent", prompt(3, 9), COUNT, small),
            priority=Priority.INTERACTIVE,
        ),
    ]
    for each in later:
        made.add(each)
    while not made.idle:
        results.add(made.step())
    assert list(results.terminals) == ["urgent", "running", "batch"]
    assert_as_peft(results, later, "llama")


def test_nobody_overtakes_for_ever(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less urgent work has its turn, too, however much more urgent work keeps the room in use."""
    monkeypatch.setattr("gpu_worker.engines.paged.weights.lora_manager.PATIENCE_SECONDS", 0.0)
    small, large = two("llama", shelf)
    made = engine_with(max(bytes_of(small), bytes_of(large)))
    results = Results()
    urgent = replace(
        lora_adapters.greedy_sequence("0", prompt(1, 9), COUNT, small),
        priority=Priority.INTERACTIVE,
    )
    made.add(urgent)
    made.add(
        replace(
            lora_adapters.greedy_sequence("batch", prompt(2, 9), COUNT, large),
            priority=Priority.BATCH,
        )
    )
    for number in range(1, 40 * COUNT):
        results.add(made.step())
        if "batch" in results.terminals:
            break
        made.add(replace(urgent, request_id=str(number)))
    assert results.terminals["batch"].finish == "length"


def test_an_adapter_larger_than_the_budget_is_refused_with_numbers(shelf: Path) -> None:
    """It could never be loaded; an operator must see by how much."""
    small, large = two("llama", shelf)
    made = engine_with(bytes_of(small))
    results = run_to_end(
        made,
        [
            lora_adapters.greedy_sequence("s", prompt(1, 9), 4, small),
            lora_adapters.greedy_sequence("l", [5], 4, large),
        ],
    )
    error = results.terminals["l"].error
    assert error
    assert error.code == "adapter_failed"
    assert f"{bytes_of(large)} bytes" in str(error)
    assert f"{bytes_of(small)} (adapter_bytes)" in str(error)
    assert results.terminals["s"].finish == "length"


def test_an_adapter_of_a_directory_that_is_not_allowed_fails_alone(tmp_path: Path) -> None:
    """A record may not have a worker read what its settings leave out; the file is never opened."""
    small, large = two("llama", tmp_path)
    (Path(large.directory) / "adapter_config.json").unlink()
    allowed = partial(check_directory, DestinationPolicy(model_roots=(Path(small.directory),)))
    made = TransformersEngine(
        tiny_models.load_tiny_model("llama"), 8, 512, 2048, check_directory=allowed
    )
    sequences = mixed([None, small])
    results = run_to_end(
        made, [lora_adapters.greedy_sequence("bad", prompt(7, 9), 4, large), *sequences]
    )
    error = results.terminals["bad"].error
    assert error
    assert error.code == "adapter_failed"
    assert "allow it with --model-root" in str(error)
    assert_as_peft(results, sequences, "llama")


def test_a_damaged_adapter_fails_alone(tmp_path: Path) -> None:
    """The others in the batch go on, and the next request finds a repaired file."""
    small, large = two("llama", tmp_path)
    weights = Path(large.directory) / "adapter_model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + b"x")
    made = tiny_models.engine()
    sequences = mixed([None, small])
    results = run_to_end(
        made, [lora_adapters.greedy_sequence("bad", prompt(7, 9), 4, large), *sequences]
    )
    error = results.terminals["bad"].error
    assert error
    assert error.code == "adapter_failed"
    assert "adapter_model.safetensors: has sha256" in str(error)
    assert_as_peft(results, sequences, "llama")
    weights.write_bytes(sound)
    mended = lora_adapters.greedy_sequence("mended", prompt(7, 9), COUNT, large)
    assert_as_peft(run_to_end(made, [mended]), [mended], "llama")


def test_an_adapter_of_another_model_fails_alone(shelf: Path) -> None:
    """Where the base's files could not be read at registration, its layers tell here."""
    other = lora_adapters.reference(
        lora_adapters.save_adapter(shelf / "a", "gpt_neox", 1, 2, target_modules=["dense"]), "a"
    )
    results = run_to_end(
        tiny_models.engine(),
        [
            lora_adapters.greedy_sequence("bad", [5], 4, other),
            lora_adapters.greedy_sequence("r", [5], 4, None),
        ],
    )
    error = results.terminals["bad"].error
    assert error
    assert "attention.dense is no linear layer of the model" in str(error)
    assert results.terminals["r"].finish


def test_an_adapter_that_leaves_out_a_layer_is_refused_by_its_modules(tmp_path: Path) -> None:
    """peft would serve it as an adapter that changes less than was trained."""
    whole = lora_adapters.save_adapter(tmp_path, "llama", 1, 2)
    weights = whole / "adapter_model.safetensors"
    kept = {name: t for name, t in load_file(weights).items() if "layers.1.self_attn.q" not in name}
    save_file(kept, weights)
    adapter = lora_adapters.reference(whole, "hole")
    asked = lora_adapters.greedy_sequence("r", [5], 4, adapter)
    error = run_to_end(tiny_models.engine(), [asked]).terminals["r"].error
    assert error
    reason = r"no weights for 1 of the 12 modules .*: model\.layers\.1\.self_attn\.q_proj"
    assert re.search(reason, str(error))


class _Gate:
    """Holds loads until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        monkeypatch.setattr("gpu_worker.engines.paged.weights.lora_manager.load_lora", self._load)

    def _load(self, *args: Any) -> LoraWeights:
        assert self.opened.wait(60)
        return load_lora(*args)


def test_the_batch_goes_on_while_an_adapter_loads(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others must not feel that somebody's weights come over a slow network."""
    gate, made = _Gate(monkeypatch), tiny_models.engine()
    adapter, _ = two("llama", shelf)
    late = lora_adapters.greedy_sequence("late", prompt(1, 9), COUNT, adapter)
    made.add(late)
    base = lora_adapters.greedy_sequence("base", prompt(2, 9), COUNT, None)
    results = Results()
    made.add(base)
    while "base" not in results.terminals:
        results.add(made.step())
    assert "late" not in results.tokens
    gate.opened.set()
    while not made.idle:
        results.add(made.step())
    assert_as_peft(results, [base, late], "llama")


def test_a_sequence_that_waits_for_its_adapter_can_be_cancelled(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not in the scheduler yet, and must leave nothing behind."""
    gate, made = _Gate(monkeypatch), tiny_models.engine()
    adapter, _ = two("llama", shelf)
    room = made.free_capacity()
    made.add(lora_adapters.greedy_sequence("r", prompt(1, 9), COUNT, adapter))
    assert made.step() == []
    made.cancel("r")
    (output,) = made.step()
    assert output.finish == "cancelled"
    assert made.idle
    assert made.free_capacity() == room
    gate.opened.set()


def test_without_adapters_no_layer_has_a_hook(shelf: Path) -> None:
    """Who uses none pays nothing, also after others have."""
    adapter, _ = two("llama", shelf)
    loaded = tiny_models.load_tiny_model("llama")
    made = TransformersEngine(loaded, 8, 512, 2048)
    run_to_end(made, [lora_adapters.greedy_sequence("a", prompt(1, 9), 4, adapter)])
    assert any(each._forward_hooks for each in loaded.model.modules())
    run_to_end(made, [lora_adapters.greedy_sequence("b", prompt(1, 9), 4, None)])
    assert not any(each._forward_hooks for each in loaded.model.modules())
