"""Our `transformers` engine, built as a worker builds it."""

from bench.contenders.load import STEP_TOKENS, Load, read, report
from gpu_worker.engine import Engine, Sequence
from gpu_worker.engines import factory
from streams.messages import Sampling


def main(load: Load) -> None:
    sizes = {"max_sequences": load.concurrency, "max_batch_tokens": STEP_TOKENS}
    engine = factory.build("transformers", load.directory, sizes)
    sampling = Sampling(max_tokens=load.output_tokens, temperature=0, ignore_eos=True)

    def run(prompts: list[list[int]]) -> int:
        for number, prompt in enumerate(prompts):
            engine.add(Sequence(str(number), prompt, sampling))
        return _drain(engine)

    report(load, run)


def _drain(engine: Engine) -> int:
    tokens = 0
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
            tokens += len(output.tokens)
    return tokens


if __name__ == "__main__":
    main(read())
