"""Compares the engine with its device: decode with copy bandwidth, prefill with matrix rate.

`bench/gpu.sh` runs it. The model is a Llama of 8 billion parameters in bfloat16, with random
weights made on the device; points that do not fit into its memory are left out. Without a GPU only
`--tiny` makes sense, and the results say so.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from bench import reporting
from bench.contenders.workload import Workload
from bench.reporting import Figure
from gpu_worker.engines import device_memory
from gpu_worker.engines.engine import DoesNotFit, Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from gpu_worker.engines.paged.engine_loader import fit_engine
from gpu_worker.engines.paged.model_loader import LoadedCausalLM, inspect_model
from gpu_worker.engines.paged.weights.linear_layers import merge_and_pack
from streams.messages import Sampling

REPEATS = 10
GOALS = {1: "≥ 0.75", 64: "≥ 0.6"}  # of the roofline, by batch


@dataclass(frozen=True)
class ModelScale:
    """The model to measure, the points (batch and context), and the amount of work in each."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    dtype: torch.dtype
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    step_tokens: int
    steps: int
    copied: int  # bytes
    matrix: int  # rows of a square matrix

    @property
    def config(self) -> LlamaConfig:
        """The model's configuration."""
        return LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.inner,
            num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, max_position_embeddings=2 * max(self.contexts),
            eos_token_id=2, pad_token_id=0, dtype=self.dtype,
        )  # fmt: skip


WHOLE = ModelScale(
    128_256, 4096, 14_336, 32, 32, 8, torch.bfloat16,
    (1, 8, 64, 256), (1024, 8192), 4096, 32, 4 << 30, 8192,
)  # fmt: skip
TINY = ModelScale(
    512, 64, 128, 2, 4, 2, torch.float32, (1, 3), (32, 64), 48, 4, 1 << 20, 128
)  # fmt: skip


def main() -> None:
    """Measure on the default device, as the command line says."""
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--out", type=Path, default=reporting.DIRECTORY, help="where results go")
    words = parser.parse_args()
    device = device_memory.default_device()
    if device.type == "cpu" and not words.tiny:
        parser.error("there is no GPU here; --tiny tries the script on the CPU")
    measure(TINY if words.tiny else WHOLE, device, words.out)


def measure(scale: ModelScale, device: torch.device, out: Path) -> None:
    """Measure every point that fits into the device's memory, and publish one table to `out`."""
    limits = DeviceLimits(copy_bandwidth(scale, device), matrix_rate(scale, device))
    run = {"copy_gb_s": limits.bandwidth / 1e9, "matrix_tflop_s": limits.rate / 1e12}
    failed: dict[str, str] = {}
    for batch, context in product(scale.batches, scale.contexts):
        name = f"b{batch}_c{context}"
        try:
            point = _point(scale, device, batch, context)
        except (DoesNotFit, torch.OutOfMemoryError) as error:
            failed[name] = str(error).partition("\n")[0]
        else:
            run |= {f"{name}_{what}": value for what, value in point.figures(limits).items()}
    run["same_text"] = share_of_same_text(device)
    run["ours_tokens_s"] = our_rate(scale, device)
    if device.type == "cuda":  # it takes most of the free memory: on a CPU, other processes' too
        try:
            run["continuous_tokens_s"] = continuous_rate(scale, device)
        except Exception as error:  # another project's code must not cost us our figures
            failed["continuous_tokens_s"] = repr(error)
    name = f"{'tiny' if scale is TINY else 'llama-8b'}-{device.type}"
    setting = {
        "device": _name(device),
        "failed": failed,
        **asdict(scale),
        "dtype": str(scale.dtype),
    }
    figures = [figure for figure in _figures(scale) if figure.key in run]
    reporting.publish(name, setting, figures, [run], out)


def _figures(scale: ModelScale) -> Iterator[Figure]:
    yield Figure("copy_gb_s", "copy, GB/s read and written")
    yield Figure("matrix_tflop_s", "matrix product, TFLOP/s")
    for batch, context in product(scale.batches, scale.contexts):
        name, words = f"b{batch}_c{context}", f"batch {batch}, context {context}"
        yield Figure(f"{name}_step_ms", f"{words}: decode step, ms")
        yield Figure(f"{name}_roofline", f"{words}: of copy bandwidth", GOALS.get(batch, ""))
        yield Figure(f"{name}_matrix", f"{words}: prefill, of matrix rate", "≥ 0.5")
    yield Figure("ours_tokens_s", "tokens/s, prefill included")
    yield Figure("continuous_tokens_s", "tokens/s, transformers' continuous batching")
    yield Figure("same_text", "same seeds, same tokens as on the CPU in float32", "1")


def copy_bandwidth(scale: ModelScale, device: torch.device) -> float:
    """Measure the device's own copy, in bytes read and written per second."""
    source = torch.ones(scale.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * scale.copied / _seconds(device, lambda: target.copy_(source))


def matrix_rate(scale: ModelScale, device: torch.device) -> float:
    """Measure the product of large square matrices, in operations per second."""
    left = torch.randn((scale.matrix, scale.matrix), dtype=scale.dtype, device=device)
    return 2 * scale.matrix**3 / _seconds(device, lambda: left @ left)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The median duration of `work`, after one run to warm up."""
    work()
    return median(_timed(device, work) for _ in range(REPEATS))


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class DeviceLimits:
    """The device's limits: `bandwidth` in bytes per second, `rate` in operations per second."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Point:
    """One batch at one context: operations of its prefill, bytes of a decode step, both times."""

    prefill_seconds: float
    operations: float
    step_seconds: float
    bytes: float

    def figures(self, limits: DeviceLimits) -> dict[str, float]:
        """The step's time, and step and prefill as shares of the device's limits."""
        return {
            "step_ms": self.step_seconds * 1000,
            "roofline": self.bytes / limits.bandwidth / self.step_seconds,
            "matrix": self.operations / limits.rate / self.prefill_seconds,
        }


def _point(scale: ModelScale, device: torch.device, batch: int, context: int) -> Point:
    loaded = _model(scale, device)
    engine = fit_engine(loaded, batch, max(scale.step_tokens, batch + 1), prefix_cache=False)
    try:
        return _measured(scale, loaded, engine, batch, context)
    finally:
        engine.close()


def _measured(
    scale: ModelScale, loaded: LoadedCausalLM, engine: TransformersEngine, batch: int, context: int
) -> Point:
    steps = -(-batch * context // scale.step_tokens) + 2 * scale.steps + batch
    if (needed := batch * (context + steps)) > engine.free_capacity().tokens:
        raise DoesNotFit(
            f"{needed} tokens of KV, and there is room for {engine.free_capacity().tokens}"
        )
    load = Workload(Path(), context, steps, batch, 1)
    sampling = Sampling(max_tokens=steps, temperature=0, ignore_eos=True)
    for number, prompt in enumerate(load.prompts(1, scale.vocabulary)):
        engine.add(Sequence(str(number), prompt, sampling))
    device = loaded.model.device
    prefill = _timed(device, lambda: _prefill(engine, batch))
    for _ in range(scale.steps // 2):
        engine.step()
    before = engine.stats.generated
    step = _timed(device, lambda: [engine.step() for _ in range(scale.steps)]) / scale.steps
    assert engine.stats.generated - before == batch * scale.steps
    seen = batch * context + engine.stats.generated - batch * scale.steps / 2
    return Point(prefill, _operations(scale, batch, context), step,
                 _read_weights(loaded) + _kv_bytes(scale) * seen)  # fmt: skip


def _prefill(engine: TransformersEngine, batch: int) -> None:
    """Run until every sequence has its first token."""
    begun: set[str] = set()
    while len(begun) < batch:
        for output in engine.step():
            assert output.error is None, output.error
            begun.add(output.request_id)


def _kv_bytes(scale: ModelScale) -> int:
    """Bytes of one token's keys and values."""
    head = scale.hidden // scale.heads
    return 2 * scale.layers * scale.kv_heads * head * scale.dtype.itemsize


def _read_weights(loaded: LoadedCausalLM) -> int:
    """Bytes of weights that a step reads: all but the embedding, of which it reads a few rows."""
    embedding = device_memory.model_bytes(loaded.model.get_input_embeddings())
    return device_memory.model_bytes(loaded.model) - embedding


def _operations(scale: ModelScale, batch: int, context: int) -> float:
    """Operations of a prefill: two per layer weight and token; attention over half the square."""
    kv = scale.hidden * scale.kv_heads // scale.heads
    weights = scale.layers * scale.hidden * (2 * scale.hidden + 2 * kv + 3 * scale.inner)
    attention = 4 * scale.layers * scale.hidden * context / 2
    return batch * context * (2.0 * weights + attention)


def _middle(scale: ModelScale) -> Workload:
    """The workload to compare engines with: the last batch but one and the shortest context."""
    return Workload(Path(), scale.contexts[0], scale.steps, scale.batches[-2], 1)


def our_rate(scale: ModelScale, device: torch.device) -> float:
    """Measure our engine's tokens per second under the middle workload, prefill included."""
    load = _middle(scale)
    tokens = max(scale.step_tokens, load.concurrency + 1)
    engine = fit_engine(_model(scale, device), load.concurrency, tokens)
    sampling = Sampling(max_tokens=load.output_tokens, temperature=0, ignore_eos=True)

    def answer(prompts: list[list[int]]) -> None:
        for number, prompt in enumerate(prompts):
            engine.add(Sequence(str(number), prompt, sampling))
        _drain(engine)

    try:
        return _rate(scale, device, load, answer)
    finally:
        engine.close()


def continuous_rate(scale: ModelScale, device: torch.device) -> float:
    """Measure the same as `our_rate` of transformers' own continuous batching."""
    load = _middle(scale)
    model = _llama(scale, device)
    model.set_attn_implementation("paged|sdpa")
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=load.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def answer(prompts: list[list[int]]) -> None:
        outputs = model.generate_batch(
            inputs=prompts, generation_config=settings, progress_bar=False
        )
        generated = sum(len(output.generated_tokens) for output in outputs.values())
        assert generated == load.concurrency * load.output_tokens, generated

    return _rate(scale, device, load, answer)


def _rate(
    scale: ModelScale,
    device: torch.device,
    load: Workload,
    answer: Callable[[list[list[int]]], None],
) -> float:
    answer(load.prompts(2, scale.vocabulary))
    prompts = load.prompts(3, scale.vocabulary)
    seconds = _timed(device, lambda: answer(prompts))
    return load.concurrency * load.output_tokens / seconds


def _drain(engine: TransformersEngine) -> dict[str, list[int]]:
    """Run the engine until it is idle; the tokens of each sequence by its id."""
    tokens: dict[str, list[int]] = {}
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.tokens)
    return tokens


def share_of_same_text(device: torch.device) -> float:
    """Measure the share of sampled float32 sequences that are equal on the device and on a CPU."""
    torch.manual_seed(0)
    state = _llama(TINY, torch.device("cpu")).state_dict()
    drawn = [_sample_tokens(state, place) for place in (device, torch.device("cpu"))]
    same = [a == b for a, b in zip(*drawn, strict=True)]
    return same.count(True) / len(same)


def _sample_tokens(state: dict[str, torch.Tensor], device: torch.device) -> list[list[int]]:
    model = _llama(TINY, device)
    model.load_state_dict(state)
    engine = fit_engine(_described(model, TINY), 8, 64, 2048)
    prompts = Workload(Path(), 20, 40, 16, 1).prompts(4, TINY.vocabulary)
    for number, prompt in enumerate(prompts):
        sampling = Sampling(40, temperature=0.9, top_p=0.95, seed=number, ignore_eos=True)
        engine.add(Sequence(str(number), prompt, sampling))
    tokens = _drain(engine)
    engine.close()
    return [tokens[name] for name in sorted(tokens)]


def _model(scale: ModelScale, device: torch.device) -> LoadedCausalLM:
    model = _llama(scale, device)
    merge_and_pack(model)
    return _described(model, scale)


def _llama(scale: ModelScale, device: torch.device) -> LlamaForCausalLM:
    """A Llama with random weights, made on the device: on a CPU 8 billion take a minute."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(scale.dtype)
    try:
        with device:
            model: LlamaForCausalLM = LlamaForCausalLM(scale.config).train(False)
    finally:
        torch.set_default_dtype(default)
    return model


def _described(model: LlamaForCausalLM, scale: ModelScale) -> LoadedCausalLM:
    words = {f"w{number}": number for number in range(scale.vocabulary)}
    return inspect_model(model, Tokenizer(WordLevel(words, unk_token="w0")))


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the CPU: these figures say nothing about a GPU"


if __name__ == "__main__":
    main()
