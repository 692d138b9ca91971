"""transformers' continuous batching (`generate_batch`)."""

from transformers import AutoModelForCausalLM, GenerationConfig

from bench.contenders.workload import Workload, parse_workload, run_rounds


def main(load: Workload) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        load.directory, dtype="auto", attn_implementation="paged|sdpa"
    )
    model.train(False)
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=load.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def run(prompts: list[list[int]]) -> int:
        outputs = model.generate_batch(
            inputs=prompts, generation_config=settings, progress_bar=False
        )
        return sum(len(output.generated_tokens) for output in outputs.values())

    run_rounds(load, run)


if __name__ == "__main__":
    main(parse_workload())
