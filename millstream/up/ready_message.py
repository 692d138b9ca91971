"""The text that `millstream up` prints when all is ready: addresses, API key, a command to try."""

import json
import shlex
from collections.abc import Iterable

from millstream.up.data_directory import DataDirectory
from millstream.up.launch_plan import LaunchPlan
from millstream.up.model_registration import MINILM

PROMPT = "The old mill by the stream"


def render_ready_message(plan: LaunchPlan, data_directory: DataDirectory) -> str:
    """Return the text that `millstream up` prints when all services are ready.

    The text lists the addresses, the API key, the models and the log directory, one per line, and
    then a curl command for a first request, which includes the API key.
    """
    return f"""
Millstream is ready.

  Page      {plan.gateway_url}/
  API       {plan.gateway_url}/v1
  API key   {plan.api_key}
  Models    {", ".join(plan.models)}
  NATS      {plan.nats_url}
  Logs      {data_directory.logs}

Try it:

  {_curl_command(plan)}

Ctrl-C stops everything.
"""


def _curl_command(plan: LaunchPlan) -> str:
    path, body = _example_request(plan.models)
    words = ["curl", "-N", f"{plan.gateway_url}/v1/{path}"]
    words += ["-H", f"Authorization: Bearer {plan.api_key}", "-H", "Content-Type: application/json"]
    words += ["-d", json.dumps(body)]
    return shlex.join(words)


def _example_request(models: Iterable[str]) -> tuple[str, dict[str, object]]:
    generating = [model for model in models if model != MINILM]
    if not generating:
        return "embeddings", {"model": MINILM, "input": PROMPT}
    return "completions", {
        "model": generating[0],
        "prompt": PROMPT,
        "max_tokens": 40,
        "stream": True,
    }
