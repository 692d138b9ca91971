"""The text that `millstream up` prints when all is ready: addresses, API key, a command to try."""

import json
import shlex
from collections.abc import Iterable

from millstream.up.data_directory import DataDirectory
from millstream.up.launch_plan import LaunchPlan
from millstream.up.model_registration import MINILM

PROMPT = "The old mill by the stream"


def render_ready_message(
    plan: LaunchPlan, data_directory: DataDirectory, *, shows_key: bool
) -> str:
    """Return the text, with each fact on its own line and a command that can be pasted.

    Without `shows_key` the path of the key's file stands for the key, as for output that is kept.
    """
    key_file = data_directory.api_key_file
    if shows_key:
        header = shlex.quote(f"Authorization: Bearer {plan.api_key}")
    else:
        header = f'"Authorization: Bearer $(cat {shlex.quote(str(key_file))})"'
    return f"""
Millstream is ready.

  Page      {plan.gateway_url}/
  API       {plan.gateway_url}/v1
  API key   {plan.api_key if shows_key else f"in {key_file}"}
  Models    {", ".join(plan.models)}
  NATS      {plan.nats_url}
  Admin     {plan.admin_url}/admin/v1
  Logs      {data_directory.logs}

Try it:

  {_curl_command(plan, header)}

Ctrl-C stops everything.
"""


def _curl_command(plan: LaunchPlan, header: str) -> str:
    """The command of an example request; `header` is quoted for the shell already."""
    path, body = _example_request(plan.models)
    words = ["curl", "-N", f"{plan.gateway_url}/v1/{path}", "-H", "Content-Type: application/json"]
    words += ["-d", json.dumps(body)]
    return f"{shlex.join(words)} -H {header}"


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
