"""The contender `vllm` with its layers compiled, which needs a C++ compiler."""

from bench.contenders.vllm import main
from bench.contenders.workload import parse_workload

if __name__ == "__main__":
    main(parse_workload(), compiled=True)
