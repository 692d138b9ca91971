"""What `millstream up` prints when everything is ready: addresses, the key, a command to try."""

import json
import shlex
from collections.abc import Iterable

from millstream.up.catalogue import MINILM
from millstream.up.home import Home
from millstream.up.plan import Plan

PROMPT = "The old mill by the stream"


def welcome(plan: Plan, home: Home) -> str:
    """Lines for a person; each fact is on a line of its own, and the command can be pasted."""
    return f"""
Millstream is ready.

  Page      {plan.url}/
  API       {plan.url}/v1
  API key   {plan.key}
  Models    {", ".join(plan.models)}
  NATS      {plan.nats}
  Logs      {home.logs}

Try it:

  {_curl(plan)}

Ctrl-C stops everything.
"""


def _curl(plan: Plan) -> str:
    path, body = _example(plan.models)
    words = ["curl", "-N", f"{plan.url}/v1/{path}"]
    words += ["-H", f"Authorization: Bearer {plan.key}", "-H", "Content-Type: application/json"]
    words += ["-d", json.dumps(body)]
    return shlex.join(words)


def _example(models: Iterable[str]) -> tuple[str, dict[str, object]]:
    generating = [model for model in models if model != MINILM]
    if not generating:
        return "embeddings", {"model": MINILM, "input": PROMPT}
    return "completions", {
        "model": generating[0],
        "prompt": PROMPT,
        "max_tokens": 40,
        "stream": True,
    }
