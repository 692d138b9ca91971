"""Reads a model's own defaults of sampling from generation_config.json, as vLLM does.

`do_sample` is not read: a file in which it is false, or missing, gives no other defaults, since the
API's own is to sample. Neither are lengths (`max_length`, `max_new_tokens`), which a model's record
has (`default_max_tokens`). What the engine cannot do, such as beams, is left out with a warning.
"""

from collections.abc import Iterator
from typing import Any

from registry.artifact_verification import ArtifactRefused, ReadJson
from registry.checkpoints.findings import Finding
from streams.messages import GREEDY_BELOW, SamplingDefaults

FILE = "generation_config.json"
# Least and greatest values; what the API allows, where a client may say it
_RANGES = {
    "temperature": (0, float("inf")),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
# What changes `generate`'s answers and is not done here, with the values that change nothing
_LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "watermarking_config": (),
}


def warn_of_settings_left_out(read: ReadJson) -> Iterator[Finding]:
    """Yield a warning of settings with which `generate` would answer otherwise than this engine.

    The file's content must be what `read_sampling_defaults` takes.
    """
    content = read(FILE) or {}
    changing = [
        name
        for name, neutral in _LEFT_OUT.items()
        if content.get(name) is not None and content[name] not in neutral
    ]
    if changing:
        reason = f"has {', '.join(changing)}, which are left out, as in vLLM"
        yield Finding(FILE, reason, is_refusal=False)


def read_sampling_defaults(read: ReadJson) -> SamplingDefaults:
    """Return what is to be taken for sampling parameters that a request does not say.

    Raises `ArtifactRefused` for a value that no request might have.
    """
    content = read(FILE) or {}
    if not isinstance(content, dict):
        raise ArtifactRefused(FILE, "is not a JSON object")
    given = {name: content[name] for name in _RANGES if content.get(name) is not None}
    _check_end_ids(content.get("eos_token_id"))
    found: dict[str, Any] = {name: _check(name, value) for name, value in given.items()}
    if found.get("temperature", 1.0) < GREEDY_BELOW or found.get("top_p", 1.0) == 0:
        found |= {"temperature": 0.0, "top_p": 1.0}
    if "top_k" in found:
        found["top_k"] = max(int(found["top_k"]), 0)
    return SamplingDefaults(**found)


def _check_end_ids(value: Any) -> None:
    """Raise `ArtifactRefused` unless a value is the id of an end token, a list of ids, or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ArtifactRefused(
            FILE, f"has eos_token_id {value!r}, which is no id and no list of ids"
        )


def _check(name: str, value: Any) -> float:
    least, greatest = _RANGES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_whole = name != "top_k" or (is_number and value == value // 1)
    if not is_number or not is_whole or not least <= value <= greatest:
        reason = f"has {name} {value!r}, which is no number from {least} to {greatest}"
        raise ArtifactRefused(FILE, f"{reason}; correct it or leave it out")
    return float(value)
