"""OpenAI's SDK for Python: whole, streamed, several choices, errors, and no vain repetition."""

import sys
import time
from collections.abc import Callable

import openai

url, key, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
asked = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}

whole = client.chat.completions.create(**asked, n=2, seed=3)  # type: ignore[call-overload]
assert [choice.index for choice in whole.choices] == [0, 1]
assert whole._request_id
assert whole._request_id in whole.id
options = {"include_usage": True}
events = list(
    client.chat.completions.create(**asked, seed=3, stream=True, stream_options=options)  # type: ignore[call-overload]
)
text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
assert text == whole.choices[0].message.content, (text, whole)
assert events[-1].usage.completion_tokens > 0
assert model in [each.id for each in client.models.list()]


def failure_of(call: Callable[[], object]) -> openai.APIStatusError:
    """Return the error that a call raises."""
    try:
        call()
    except openai.APIStatusError as error:
        return error
    raise AssertionError("it did not fail")


begun = time.monotonic()
late = failure_of(
    lambda: client.completions.create(
        model=model, prompt="hi", max_tokens=2000, extra_body={"deadline_ms": 300}
    )
)
assert (late.status_code, late.code) == (504, "deadline_exceeded")
assert late.request_id
assert time.monotonic() - begun < 1.5, "the SDK has repeated a request whose deadline had passed"
stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-wrong")
assert failure_of(lambda: stranger.models.list()).code == "invalid_api_key"
print("openai", openai.__version__)
