"""A tiny model behind the OpenAI API: its grammar, penalties and seeds work as real servers' do.

What a call has generated itself counts as output, and what its prompt holds does not: so a grammar
begins anew in each call, and penalties know nothing of an earlier one. A token is a `PIECE`.
"""

from collections import deque
from collections.abc import Iterable
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models

from tests.support.stub_upstream import UpstreamCall

PIECES = (
    *("the ", "mill ", "by ", "stream ", "ground ", "all ", "corn "),
    *("{", '"wheels": ', "12", "34", "56", ", ", '"stones": ', "}"),
)
WORDS = PIECES[:7]
DOCUMENT = (["{"], ['"wheels": '], ["12", "34", "56"], [", "], ['"stones": '], ["12", "34"], ["}"])
LENGTH = 9  # words of a text that no grammar bounds, those in the prompt included
_FIRST_PIECE = 128  # its id; those below are ASCII's


def pieces_tokenizer() -> Tokenizer:
    """One whose ids are the bytes of ASCII, and those of the pieces behind them."""
    vocabulary = {chr(byte): byte for byte in range(_FIRST_PIECE)}
    pieces = {piece: _FIRST_PIECE + n for n, piece in enumerate(PIECES) if len(piece) > 1}
    made = Tokenizer(models.BPE({**vocabulary, **pieces}, []))
    made.decoder = decoders.Fuse()
    return made


def piece_id(piece: str) -> int:
    return ord(piece) if len(piece) == 1 else _FIRST_PIECE + PIECES.index(piece)


def _prompt_text(prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    names = {piece_id(piece): piece for piece in PIECES}
    return "".join(names.get(token) or chr(token) for token in prompt)


class TinyModelServer:
    """A responder; its next calls break after so many pieces as `breaks` says, one after another.

    `counts_prompt`: its repetition penalty is for the prompt's words, too, as vLLM's.
    `ignores_seed`: each of its calls draws other numbers. `groups`: pieces in one event, by call.
    """

    def __init__(
        self,
        breaks: Iterable[int] = (),
        *,
        counts_prompt: bool = False,
        ignores_seed: bool = False,
        groups: Iterable[int] = (),
    ) -> None:
        self.breaks, self.groups = deque(breaks), deque(groups)
        self.counts_prompt, self.ignores_seed = counts_prompt, ignores_seed
        self._calls = 0

    def __call__(self, call: UpstreamCall) -> None:
        self._calls += 1
        generated, is_whole = self._generate(call.body)
        until = self.breaks.popleft() if self.breaks else None
        group = self.groups.popleft() if self.groups else 1
        call.send_head(kind="text/event-stream")
        for at in range(0, len(generated[:until]), group):
            said = generated[:until][at : at + group]
            call.send_text("".join(said), **self._details(call.body, said))
        if until is not None:
            return  # in order: a reset would take from the client what it has not read yet
        call.send_text("", "stop" if is_whole else "length")
        prompt, count = len(_prompt_text(call.body["prompt"]).split()), len(generated)
        usage = {"prompt_tokens": prompt, "completion_tokens": count}
        call.send_event({"choices": [], "usage": usage})
        call.send_event("[DONE]")

    def _details(self, body: dict[str, Any], said: list[str]) -> dict[str, Any]:
        details: dict[str, Any] = {}
        if body.get("return_token_ids"):
            details["token_ids"] = [piece_id(piece) for piece in said]
        if "logprobs" in body:
            as_ids = body.get("return_tokens_as_token_ids")
            names = [f"token_id:{piece_id(piece)}" if as_ids else piece for piece in said]
            values = [-float(piece_id(piece)) for piece in said]
            details["logprobs"] = {"tokens": names, "token_logprobs": values}
        return details

    def _generate(self, body: dict[str, Any]) -> tuple[list[str], bool]:
        """The pieces of an answer, and whether the model ended it."""
        before = _prompt_text(body["prompt"])
        generated: list[str] = []
        while choices := self._choices(body, before, generated):
            if len(generated) == body["max_tokens"]:
                return generated, False
            scores = [self._score(body, before, generated, piece) for piece in choices]
            generated.append(choices[scores.index(max(scores))])
        return generated, True

    def _choices(self, body: dict[str, Any], before: str, generated: list[str]) -> list[str]:
        if "response_format" in body or "structured_outputs" in body:
            return DOCUMENT[len(generated)] if len(generated) < len(DOCUMENT) else []
        said = sum(map(before.count, WORDS)) + len(generated)
        return list(WORDS) if said < LENGTH else []

    def _score(self, body: dict[str, Any], before: str, generated: list[str], piece: str) -> float:
        """The model's score of a piece, by the last word alone, less the penalties."""
        text = "".join([before, *generated])
        last = next((word for word in WORDS if text.endswith(word)), "")
        score = 1 + Random(last + piece).random()
        if piece in generated or (self.counts_prompt and piece in before):
            score /= float(body.get("repetition_penalty", 1))
        score -= float(body.get("frequency_penalty", 0)) * generated.count(piece)
        score -= float(body.get("presence_penalty", 0)) * (piece in generated)
        drawn = self._calls if self.ignores_seed else body["seed"]
        noise = Random(f"{drawn}:{len(generated)}:{piece}").random()
        return score + 3 * float(body["temperature"]) * noise
