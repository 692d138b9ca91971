"""Measures the engine alone, without services, in a closed loop.

`python -m bench.engine_alone DIRECTORY SECONDS SEQUENCES PROMPT OUTPUT` (PROMPT and OUTPUT in
tokens): when a sequence ends the next is added, as clients of `millstream bench` do.
"""

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_worker.engines import factory
from gpu_worker.engines.engine import Engine, Sequence
from gpu_worker.settings import WorkerSettings
from millstream.bench.prompts import Prompts
from registry.model_inspection import inspect_model
from streams.messages import Sampling


def main(directory: Path, seconds: float, *sizes: int) -> None:
    """Print the engine's generated tokens per second as JSON."""
    worker = WorkerSettings(model=(directory.name,))
    options = {
        "max_sequences": worker.max_sequences,
        "max_batch_tokens": worker.max_batch_tokens,
    }
    engine = factory.build("transformers", directory, options)
    sequences, prompt_tokens, output_tokens = sizes
    prompts = Prompts(inspect_model(directory).vocab_size, seed=0)
    waiting = _sequences(prompts, prompt_tokens, output_tokens)
    for sequence in itertools.islice(waiting, sequences):
        engine.add(sequence)
    print(json.dumps({"tokens_per_second": _keep_full(engine, waiting, seconds)}))


def _sequences(prompts: Prompts, prompt_tokens: int, output_tokens: int) -> Iterator[Sequence]:
    sampling = Sampling(max_tokens=output_tokens, temperature=0, ignore_eos=True)
    for number in itertools.count():
        prompt = prompts.make_prompt(prompt_tokens)
        assert isinstance(prompt, list)
        yield Sequence(f"s{number}", prompt, sampling)


def _keep_full(engine: Engine, waiting: Iterator[Sequence], seconds: float) -> float:
    """Keep the engine full for `seconds`; return its tokens per second."""
    began, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        for output in engine.step():
            assert output.error is None, output.error
            tokens += len(output.tokens)
            if output.finish:
                engine.add(next(waiting))
    return tokens / elapsed


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:]))
