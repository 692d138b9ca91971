"""instructor: a record as the answer, where the model has grammars; else a plain answer."""

import sys
from importlib.metadata import version

import instructor  # type: ignore[import-not-found]
import openai
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    is_capital: bool


url, key, model = sys.argv[1:]
plain = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
messages = [{"role": "user", "content": "Paris"}]
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(plain, mode=mode)
    if model == "mock":
        answer = client.chat.completions.create(
            model=model, messages=messages, response_model=None, max_tokens=8
        )
        assert answer.choices[0].message.content
    else:
        city = client.chat.completions.create(
            model=model, messages=messages, response_model=City, max_tokens=200, temperature=0
        )
        assert isinstance(city, City)
print("instructor", version("instructor"))
