"""The contender of ours: the `transformers` engine, built as a worker builds it."""

from bench.contenders.workload import STEP_TOKENS, Workload, parse_workload, run_rounds
from gpu_worker.engines import factory
from gpu_worker.engines.engine import Engine, Sequence
from streams.messages import Sampling


def main(load: Workload) -> None:
    """Run the rounds of the workload and print their rates."""
    sizes = {"max_sequences": load.concurrency, "max_batch_tokens": STEP_TOKENS}
    engine = factory.build("transformers", load.directory, sizes)
    sampling = Sampling(max_tokens=load.output_tokens, temperature=0, ignore_eos=True)

    def run(prompts: list[list[int]]) -> int:
        for number, prompt in enumerate(prompts):
            engine.add(Sequence(str(number), prompt, sampling))
        return _drain(engine)

    run_rounds(load, run)


def _drain(engine: Engine) -> int:
    tokens = 0
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
            tokens += len(output.tokens)
    return tokens


if __name__ == "__main__":
    main(parse_workload())
