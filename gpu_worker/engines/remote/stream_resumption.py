"""Resumes an answer, of which a part is stored, at a server that keeps nothing of it. Pure.

Servers continue a prompt: what was generated before can only be put behind it. That is exact unless
a parameter depends on which tokens are output, not prompt: a grammar begins anew in each call, and
most penalties count the call's own tokens. Such an answer is generated again from its start, and
what is stored is compared and dropped.

| stored | parameters                                         | a replay differed | mode     |
|--------|----------------------------------------------------|-------------------|----------|
| none   | any                                                |                   | RESTART  |
| some   | none that depends on the output, no seeded sampling| any               | CONTINUE |
| some   | the client's own seed, sampled                     | no                | REPLAY   |
| some   | the client's own seed, sampled                     | yes               | CONTINUE |
| some   | grammar or penalties, or text that has no tokens   | no                | REPLAY   |
| some   | grammar or penalties, or text that has no tokens   | yes               | FAIL     |
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from gpu_worker.engines.engine import EngineError, Output, Sequence
from gpu_worker.engines.remote.openai_protocol import TextOrTokens
from streams.messages import Logprob, Sampling

_DEFAULT_SAMPLING = Sampling().resolve()


class ResumeMode(Enum):
    """The way to go on: what the next call asks of the server, and what becomes of its output."""

    RESTART = "restart"  # the prompt; nothing is stored, so all output is new
    CONTINUE = "continue"  # the prompt and what is stored; all output is new
    REPLAY = "replay"  # the prompt; output is new behind what is stored, which it must repeat
    FAIL = "fail"  # nothing: the answer cannot be resumed exactly


class ReplayDiffers(Exception):
    """A server that was asked for an answer again did not repeat what is stored of it."""


def find_output_dependent(sampling: Sampling, names: Iterable[str]) -> list[str]:
    """Return those of the parameters `names` that a request sets, in order.

    `names` are the parameters whose effect depends on what a call itself has generated.
    """
    resolved = sampling.resolve()
    return [name for name in names if getattr(resolved, name) != getattr(_DEFAULT_SAMPLING, name)]


def choose_resume_mode(
    sequence: Sequence, *, can_continue: bool, replay_differed: bool
) -> ResumeMode:
    """Return how to resume a sequence; the table is at the top of this file.

    `can_continue`: the answer is the same if what is stored is put behind the prompt.
    `replay_differed`: the server has been asked again and did not repeat what is stored.
    """
    sampling = sequence.sampling.resolve()
    if not sequence.generated and not sequence.text:
        return ResumeMode.RESTART
    is_seeded = sampling.seed is not None and sampling.temperature > 0
    if can_continue and (replay_differed or not is_seeded):
        return ResumeMode.CONTINUE
    return ResumeMode.FAIL if replay_differed else ResumeMode.REPLAY


def resume_failure(dependent: Iterable[str]) -> EngineError:
    """Return, without raising it, the error for an answer that cannot be resumed exactly.

    `dependent` are the request's parameters that depend on its output; without any, the reason is
    that the model's tokeniser cannot encode the text that is stored.
    """
    names = ", ".join(dependent)
    why = (
        f"the server cannot resume its {names}"
        if names
        else "the model's tokenizer cannot encode the text so far"
    )
    message = (
        f"the stream broke, and the answer cannot be continued exactly: {why}, and when asked "
        "again the server began another answer; send the request again"
    )
    return EngineError("upstream_failed", message)


@dataclass
class StoredPrefix:
    """Compares the outputs of a replay with what is stored of the answer, and drops that part.

    Tokens are compared where `has_token_ids`; elsewhere only the text is known, and a replay may
    come in other pieces. Where nothing is stored, nothing is dropped.
    """

    stored_tokens: list[int]
    stored_text: str
    has_token_ids: bool
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[Logprob] = field(default_factory=list)
    _text: str = ""

    def __post_init__(self) -> None:
        self._to_drop = len(self.stored_tokens)

    @property
    def is_complete(self) -> bool:
        """True once all that is stored was repeated; further outputs are new."""
        return self._covers_all()

    def drop(self, output: Output) -> Output:
        """Return the part of the replay's next output that is not stored yet; may be empty.

        Raises `ReplayDiffers` for an output that does not repeat what is stored.
        """
        if not self._covers_all():
            self._tokens += output.tokens
            self._logprobs += output.logprobs or ()
            self._text += output.text
            self._compare()
            if not self._covers_all():
                return Output(output.request_id)
            text = self._text[len(self.stored_text) :]
            output = Output(output.request_id, self._tokens, text, self._logprobs)
        return self._drop_tokens(output)

    def _drop_tokens(self, output: Output) -> Output:
        """Return an output without tokens that are stored.

        Where only text is known, a replay in larger pieces has fewer tokens: one stays with any
        text.
        """
        kept = 0 if self.has_token_ids else int(bool(output.text))
        count = max(0, min(self._to_drop, len(output.tokens) - kept))
        self._to_drop -= count
        logprobs = (output.logprobs or [])[count:] or None
        return replace(output, tokens=output.tokens[count:], logprobs=logprobs)

    def _compare(self) -> None:
        same = _agree(self._text, self.stored_text)
        if not same or (self.has_token_ids and not _agree(self._tokens, self.stored_tokens)):
            raise ReplayDiffers

    def _covers_all(self) -> bool:
        if self.has_token_ids and len(self._tokens) < len(self.stored_tokens):
            return False
        return len(self._text) >= len(self.stored_text)


def _agree(replayed: TextOrTokens, stored: TextOrTokens) -> bool:
    """True if one of the two begins with the other."""
    length = min(len(replayed), len(stored))
    return replayed[:length] == stored[:length]
