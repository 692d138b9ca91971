"""A worker of NVIDIA Dynamo whose tokens cost nothing.

Its arguments are MODEL_DIRECTORY TTFT_SECONDS ITL_SECONDS.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

FIRST_TOKEN = 1000


async def main(directory: str, ttft: float, itl: float) -> None:
    """Serve the model `mock`; times to first token and between tokens are in seconds."""
    loop = asyncio.get_running_loop()

    async def generate(request: dict[str, Any], context: object) -> AsyncIterator[dict[str, Any]]:
        """Yield one token at a time, each when it is due."""
        count, due = request["stop_conditions"]["max_tokens"], loop.time() + ttft
        first = FIRST_TOKEN + len(request["token_ids"])  # so a migrated request continues
        for number in range(1, count + 1):
            await asyncio.sleep(due - loop.time())
            due += itl
            end = {"finish_reason": "length"} if number == count else {}
            yield {"token_ids": [first + number], **end}

    runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("bench.mock.generate")
    await register_model(
        ModelInput.Tokens,
        ModelType.Completions,
        endpoint,
        directory,
        model_name="mock",
        worker_type=WorkerType.Aggregated,
    )
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
