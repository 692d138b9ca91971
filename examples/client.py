"""Sends several requests at once and prints one answer as it comes: client.py [URL [MODEL [KEY]]].

Kill the gateway meanwhile, or start a second one and name it too: the text stays the same.
"""

import asyncio
import sys
from pathlib import Path

from millstream_client import Client, MillstreamError

KEY_FILE = Path.home() / ".millstream/api-key"


async def main(
    url: str = "http://127.0.0.1:8080", model: str = "gemma-3-270m", key: str = ""
) -> None:
    async with Client([url], api_key=key or KEY_FILE.read_text().strip()) as client:
        others = [client.generate(model=model, prompt=f"{n} mills", max_tokens=8) for n in range(3)]
        stream = client.generate(model=model, prompt="The old mill by the stream", max_tokens=40)
        try:
            async with asyncio.TaskGroup() as tasks:
                texts = [tasks.create_task(other.text()) for other in others]
                async for chunk in stream:
                    print(chunk.text, end="", flush=True)
        except* MillstreamError as errors:
            sys.exit(f"\n{errors.exceptions[0]}")
        print(f"\n{stream.done}")
        print([text.result() for text in texts])


asyncio.run(main(*sys.argv[1:]))
