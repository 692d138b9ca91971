"""vLLM as `vllm` has it, with its layers compiled, for which it needs a C++ compiler."""

from bench.contenders.load import read
from bench.contenders.vllm import main

if __name__ == "__main__":
    main(read(), compiled=True)
