"""The workload of every contender: equally long prompts of random tokens, all at once, greedy."""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STEP_TOKENS = 4096  # most tokens in one forward pass of an engine with steps: vLLM's own default

# Takes prompts (token ids), returns how many tokens were generated.
GenerateAll = Callable[[list[list[int]]], int]


@dataclass(frozen=True)
class Workload:
    """A model and a workload for it: `concurrency` prompts at once in each of `rounds` rounds."""

    directory: Path
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    rounds: int

    @property
    def context(self) -> int:
        """Tokens of prompt and output together."""
        return self.prompt_tokens + self.output_tokens

    def prompts(self, number: int, vocabulary: int = 8000) -> list[list[int]]:
        """Return the prompts of a round; each round has new ones, so that no prefix cache helps."""
        draw = random.Random(number)
        ids = range(8, vocabulary)
        return [draw.choices(ids, k=self.prompt_tokens) for _ in range(self.concurrency)]


def parse_workload() -> Workload:
    """Return the workload that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    for name in ("prompt_tokens", "output_tokens", "concurrency", "rounds"):
        parser.add_argument(name, type=int)
    return Workload(**vars(parser.parse_args()))


def run_rounds(load: Workload, run: GenerateAll) -> None:
    """Warm up with one round, then print each round's generated tokens per second as JSON.

    `run` generates the output of all prompts. Raises `AssertionError` if their number is wrong.
    """
    run(load.prompts(0))
    print(json.dumps([_rate(load, run, number) for number in range(1, load.rounds + 1)]))


def _rate(load: Workload, run: GenerateAll, number: int) -> float:
    prompts = load.prompts(number)
    began = time.perf_counter()
    tokens = run(prompts)
    seconds = time.perf_counter() - began
    assert tokens == load.concurrency * load.output_tokens, tokens
    return tokens / seconds
