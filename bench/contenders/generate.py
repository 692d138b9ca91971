"""The contender `generate` of transformers, over one static batch: no queue, no paging."""

import torch
from transformers import AutoModelForCausalLM

from bench.contenders.workload import Workload, parse_workload, run_rounds


def main(load: Workload) -> None:
    """Run the rounds of the workload and print their rates."""
    model = AutoModelForCausalLM.from_pretrained(load.directory, dtype="auto")
    model.train(False)

    def run(prompts: list[list[int]]) -> int:
        with torch.inference_mode():
            out = model.generate(  # type: ignore[misc]
                torch.tensor(prompts),
                attention_mask=torch.ones(len(prompts), load.prompt_tokens, dtype=torch.long),
                do_sample=False,
                max_new_tokens=load.output_tokens,
                min_new_tokens=load.output_tokens,
            )
        return int(out[:, load.prompt_tokens :].numel())

    run_rounds(load, run)


if __name__ == "__main__":
    main(parse_workload())
