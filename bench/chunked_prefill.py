"""Compares chunked prefill with whole prompts by inter-token times while other prompts come in.

Arrivals are Poisson at 80 % of the capacity that the same lengths reach in a closed loop; lengths
are an eighth of those of a trace, whose CSV MILLSTREAM_BENCH_TRACE names: the Azure conversations
of Patel et al., "Splitwise", ISCA 2024.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bench import reporting
from bench.reporting import Figure, Run
from bench.synthetic_models import VOCABULARY, small_llama
from gpu_worker.engines import factory
from gpu_worker.engines.engine import Engine, Sequence
from millstream.bench.arrivals import Arrival, read_trace
from millstream.bench.load_statistics import percentile
from millstream.bench.prompts import Prompts
from streams.messages import Sampling

TRACE = "MILLSTREAM_BENCH_TRACE"
DIVISOR, LOAD, SEQUENCES = 8, 0.8, 32
CHUNKED, WHOLE = 128, 2048  # tokens per step: chunks of prompts, or the longest prompt at once
FIGURES = tuple(
    Figure(f"{way}_{name}", f"{words}, {way}", goal if way == "chunked" else "")
    for way in ("chunked", "whole")
    for name, words, goal in (
        ("p50_ms", "inter-token p50, ms", ""),
        ("p99_ms", "inter-token p99, ms", ""),
        ("p99_over_p50", "p99 over p50", "≤ 3"),
    )
)


@dataclass
class InterTokenTimes:
    """The time of each sequence's last token, and the seconds between tokens of all sequences."""

    last: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    ended: int = 0

    def step_engine(self, engine: Engine) -> None:
        """Run one step of the engine and record the times of its tokens."""
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            assert output.error is None, output.error
            if output.request_id in self.last:
                self.seconds.append(now - self.last[output.request_id])
            self.last[output.request_id] = now
            self.ended += output.finish is not None


def measure(runs: int, seconds: float) -> None:
    """Measure both settings in turn, and publish."""
    if TRACE not in os.environ:
        raise SystemExit(f"mixed: {TRACE} must name the CSV of a trace")
    with tempfile.TemporaryDirectory() as home:
        directory = small_llama(Path(home))
        measured = [_run(directory, seconds, number) for number in range(runs)]
    setting = {"divisor": DIVISOR, "load": LOAD, "sequences": SEQUENCES, "seconds": seconds}
    setting |= {"chunked_step_tokens": CHUNKED, "whole_step_tokens": WHOLE}
    reporting.publish("mixed", setting, FIGURES, measured)


def _run(directory: Path, seconds: float, seed: int) -> Run:
    figures: dict[str, float] = {}
    for way, tokens in (("chunked", CHUNKED), ("whole", WHOLE)):
        options = {"max_sequences": SEQUENCES, "max_batch_tokens": tokens}
        engine = factory.build("transformers", directory, options)
        gaps = sorted(
            _run_open_loop(engine, LOAD * _measure_capacity(engine, seconds, seed), seconds, seed)
        )
        engine.close()
        p50, p99 = percentile(gaps, 0.5), percentile(gaps, 0.99)
        figures |= {f"{way}_p50_ms": p50 * 1000, f"{way}_p99_ms": p99 * 1000}
        figures[f"{way}_p99_over_p50"] = p99 / p50
    return figures


def _measure_capacity(engine: Engine, seconds: float, seed: int) -> float:
    """The engine's requests per second in a closed loop; it is empty again afterwards."""
    sequences, gaps, began = _sequences(seed), InterTokenTimes(), time.perf_counter()
    for sequence in itertools.islice(sequences, SEQUENCES):
        engine.add(sequence)
    while (elapsed := time.perf_counter() - began) < seconds:
        before = gaps.ended
        gaps.step_engine(engine)
        for sequence in itertools.islice(sequences, gaps.ended - before):
            engine.add(sequence)
    rate = gaps.ended / elapsed
    while not engine.idle:
        gaps.step_engine(engine)
    return rate


def _run_open_loop(engine: Engine, rate: float, seconds: float, seed: int) -> list[float]:
    """The inter-token times, in seconds, at Poisson arrivals of `rate` a second."""
    draw, sequences, gaps = Random(seed), _sequences(seed + 1000), InterTokenTimes()
    began, due = time.perf_counter(), 0.0
    while (elapsed := time.perf_counter() - began) < seconds:
        while due <= elapsed:
            engine.add(next(sequences))
            due += draw.expovariate(rate)
        if engine.idle:
            time.sleep(max(0.0, due - elapsed))
        else:
            gaps.step_engine(engine)
    return gaps.seconds


def _sequences(seed: int) -> Iterator[Sequence]:
    """Random prompts with the lengths of the trace from a place in it that depends on the seed."""
    prompts = Prompts(VOCABULARY, seed)
    for number, arrival in enumerate(_lengths(seed)):
        prompt = prompts.make_prompt(max(1, arrival.prompt_tokens // DIVISOR))
        assert isinstance(prompt, list)
        length = max(2, arrival.output_tokens // DIVISOR)
        yield Sequence(f"{seed}-{number}", prompt, Sampling(length, temperature=0, ignore_eos=True))


def _lengths(seed: int) -> Iterator[Arrival]:
    with Path(os.environ[TRACE]).open(newline="") as lines:
        rows = list(read_trace(lines))
    start = Random(seed).randrange(len(rows))
    return itertools.cycle(rows[start:] + rows[:start])
