"""The proof that an engine computes what transformers computes, from the same weights.

Before linear layers are merged and packed and attention is replaced, transformers computes the
logits of two short texts by its own attention, `compute_reference`. The engine then computes the
same texts together, cut into chunks, and the longer one alone, token by token from the end of the
prompt on, and `check_computed` compares. What is compared are the log probabilities of the
likeliest tokens, in units of the standard deviation of the reference's logits, since logits have no
unit of their own.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version

import structlog
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.engines.checkpoints.loading import UnsupportedModel, refuse_model
from gpu_worker.engines.engine import Sequence
from streams.messages import Logprob, Sampling

log = structlog.get_logger()

TEXT = (
    "The miller opened the gate in the morning, and the stream turned the old wheel again. "
    "Nobody in the village knew how long it had stood there: 200 years, said some, and others 300."
)
PROMPT_TOKENS = (7, 26)  # the second is longer than a chunk, and begins elsewhere in the text
CONTINUATION_TOKENS = 3
CHUNK_TOKENS = 17  # of a step, where the texts are cut into chunks
LIKELIEST = 20  # log probabilities compared at each position
# How far the log probabilities may be from the reference. docs/models.md has what was measured.
BOUNDS = {
    torch.float64: 0.005,
    torch.float32: 0.005,
    torch.bfloat16: 0.15,
    torch.float16: 0.05,
}
_ROUNDS_LITTLE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class ForcedText:
    """A text that the engine must compute: its prompt, and the tokens that it must answer with."""

    prompt: list[int]
    continuation: list[int]

    def to_sequence(self, request_id: str) -> Sequence:
        """Return the sequence that computes it, without what forces the continuation."""
        sampling = Sampling(max_tokens=len(self.continuation), logprobs=LIKELIEST, ignore_eos=True)
        return Sequence(request_id, self.prompt, sampling)


@dataclass(frozen=True)
class Reference:
    """The logits that transformers computes: float32 `[continuation, vocabulary]` for each text.

    Row `i` are the logits before token `i` of the continuation. `setting` is that of
    `describe_setting`. `may_flip`: rounding may change the expert that a router of a mixture
    chooses by a hair, and with it one position of a text.
    """

    architecture: str
    setting: str
    dtype: torch.dtype
    may_flip: bool
    texts: list[ForcedText]
    logits: list[Tensor]


class ForcedTokens:
    """Lets a sequence generate given tokens: a constraint in the place of a grammar's."""

    is_complete = False
    failure: str | None = None

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = list(tokens)

    def mask_logits(self, row: Tensor) -> None:
        """Ban all tokens but the next one; `row` is `[vocabulary]`, changed in place."""
        row.fill_(-torch.inf)
        row[self._tokens[0]] = 0.0

    def advance(self, tokens: Iterable[int]) -> None:
        """Go on behind `tokens`, which were generated."""
        del self._tokens[: len(list(tokens))]


def describe_setting(model: PreTrainedModel) -> str:
    """Return what a proof depends on, beside the weights: dtype, kind of device, and versions."""
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", "millstream")]
    if model.device.type == "cuda":
        kind = torch.cuda.get_device_name(model.device)
    else:
        kind = torch.backends.cpu.get_cpu_capability()
    return ", ".join([str(model.dtype), model.device.type, kind, *libraries])


@torch.inference_mode()
def compute_reference(
    model: PreTrainedModel, tokenizer: Tokenizer, vocabulary: int, context: int
) -> Reference:
    """Compute the reference with a model as transformers has made it, and its own attention."""
    texts = list(_make_texts(tokenizer, vocabulary, context))
    logits = []
    for text in texts:
        ids = torch.tensor([text.prompt + text.continuation[:-1]], device=model.device)
        count = len(text.continuation)
        result = model(input_ids=ids, use_cache=False, logits_to_keep=count)
        logits.append(result.logits[0, -count:].float().cpu())
    has_router = any("expert" in name for name in vars(model.config.get_text_config()))
    may_flip = has_router and model.dtype not in _ROUNDS_LITTLE
    name, setting = type(model).__name__, describe_setting(model)
    return Reference(name, setting, model.dtype, may_flip, texts, logits)


def _make_texts(tokenizer: Tokenizer, vocabulary: int, context: int) -> Iterable[ForcedText]:
    """Yield a text for each of `PROMPT_TOKENS`, shorter where the context is."""
    ids = [token for token in tokenizer.encode(TEXT).ids if token < vocabulary] or [0]
    for start, wanted in enumerate(PROMPT_TOKENS):
        length = min(wanted, max(1, context - CONTINUATION_TOKENS - 1))
        tokens = [ids[(start + n) % len(ids)] for n in range(length + CONTINUATION_TOKENS)]
        yield ForcedText(tokens[:length], tokens[length:])


def prove(
    reference: Reference,
    compute: Callable[[list[ForcedText], int], list[list[Logprob]]],
    whole: int,
) -> None:
    """Compute the reference's texts in every way, and raise `UnsupportedModel` if one differs.

    `compute` must compute texts together in steps of so many tokens, and return the log
    probabilities of their continuations. `whole` tokens are a step in which nothing is cut.
    """
    began, texts = time.monotonic(), reference.texts
    chunk = min(CHUNK_TOKENS, whole)
    errors = [
        check_computed(reference, compute(texts, whole), "together"),
        check_computed(reference, compute(texts, chunk), "in chunks"),
        check_computed(reference, compute(texts[-1:], whole), "alone"),
    ]
    log.info(
        "model_proven",
        architecture=reference.architecture,
        dtype=str(reference.dtype),
        error=max(errors),
        seconds=round(time.monotonic() - began, 3),
    )


def check_computed(reference: Reference, computed: list[list[Logprob]], way: str) -> float:
    """Compare what the engine computed of the last texts with the reference; return the error.

    `computed` are the log probabilities of each text's continuation, `way` says how the texts were
    computed. Raises `UnsupportedModel`, which says that a remote engine can serve the model, if the
    error is above the bound of the dtype, or if in float32 and float64 another token is the
    likeliest although the reference's two likeliest are further apart than the bound.
    """
    bound, errors = BOUNDS[reference.dtype], []
    for rows, text in zip(reference.logits[-len(computed) :], computed, strict=True):
        errors.append(_text_error(rows, text, reference.may_flip))
        if errors[-1] > bound:
            raise _refuse(reference, way, f"log probabilities are off by {errors[-1]:.3g}", bound)
        if reference.dtype in _ROUNDS_LITTLE and not _same_greedy(rows, text, bound):
            raise _refuse(reference, way, "another token is the likeliest", bound)
    return max(errors)


def _text_error(rows: Tensor, text: list[Logprob], may_flip: bool) -> float:
    """Return the error of the worst position, or of the second worst where one may have flipped."""
    errors = sorted(_position_error(row, token) for row, token in zip(rows, text, strict=True))
    return errors[-2] if may_flip and len(errors) > 1 else errors[-1]


def _position_error(row: Tensor, token: Logprob) -> float:
    wanted = row.log_softmax(-1)
    ids = torch.tensor([other for other, _, _ in token.top])
    values = torch.tensor([value for _, _, value in token.top])
    error = (values - wanted[ids]).abs().max() / row.std().clamp_min(1e-6)
    return float(error.nan_to_num(torch.inf))


def _same_greedy(rows: Tensor, text: list[Logprob], bound: float) -> bool:
    best, second = rows.topk(2).values.unbind(-1)
    is_clear = (best - second) > bound * rows.std(-1)
    chosen = torch.tensor([token.top[0][0] for token in text])
    return bool(((chosen == rows.argmax(-1)) | ~is_clear).all())


def _refuse(reference: Reference, way: str, what: str, bound: float) -> UnsupportedModel:
    return refuse_model(
        reference.architecture,
        f"computed {way}, {what}, compared with transformers and the same weights (bound "
        f"{bound:g}, in standard deviations of the logits)",
    )
