"""LangChain's chat model for OpenAI's API: whole, streamed, and a second turn."""

import sys
from importlib.metadata import version

from langchain_openai import ChatOpenAI

url, key, model = sys.argv[1:]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, max_tokens=8, seed=3)
first = chat.invoke("hi")
assert first.content
streamed = "".join(str(chunk.content) for chunk in chat.stream("hi"))
assert streamed == first.content, (streamed, first.content)
second = chat.invoke([("human", "hi"), first, ("human", "and then?")])
assert second.usage_metadata
assert second.usage_metadata["output_tokens"] > 0
print("langchain-openai", version("langchain-openai"))
