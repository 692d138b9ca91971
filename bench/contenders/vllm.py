"""The contender vLLM, in process (`LLM.generate`), without its server's cost or compilation."""

import json

from vllm import LLM, SamplingParams

from bench.contenders.workload import STEP_TOKENS, Workload, parse_workload, run_rounds


def main(load: Workload, *, compiled: bool = False) -> None:
    """Run the rounds of the workload and print their rates; `compiled` compiles vLLM's layers."""
    config = json.loads((load.directory / "config.json").read_text())
    engine = LLM(
        str(load.directory),
        dtype=config["dtype"],  # by default vLLM computes float32 models in bfloat16
        skip_tokenizer_init=True,
        max_model_len=max(load.context + 16, 1024),
        max_num_seqs=load.concurrency,
        max_num_batched_tokens=STEP_TOKENS,
        enforce_eager=not compiled,
        enable_prefix_caching=True,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=load.output_tokens, ignore_eos=True, detokenize=False
    )

    def run(prompts: list[list[int]]) -> int:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(inputs, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    run_rounds(load, run)


if __name__ == "__main__":
    main(parse_workload())
