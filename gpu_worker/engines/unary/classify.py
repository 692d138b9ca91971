"""The classify engine: probabilities of labels for a text, or a score for a pair of texts."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from gpu_worker.engines.checkpoints.loading import load_checkpoint, read_config
from gpu_worker.engines.unary.activation import build_activation
from gpu_worker.engines.unary.engine import UnaryEngine
from gpu_worker.engines.unary.padding import PaddedBatch
from registry.artifact_verification import ReadJson, json_reader
from registry.classifier import named_activation

_BY_PROBLEM: dict[str, type[nn.Module]] = {
    "regression": nn.Identity,
    "multi_label_classification": nn.Sigmoid,
}


class Classifier:
    """The model of a `ClassifyEngine`: padded texts to one row of probabilities or scores each.

    A decoder has a `score` layer over the state of the last token. It is applied here, since the
    model's own code recognises padding by its id, which may occur in a text, or not exist.
    """

    normalises = False

    def __init__(self, model: PreTrainedModel, read: ReadJson) -> None:
        self.model = model
        self.labels: list[str] | None = _read_labels(model)
        self._score: nn.Module | None = getattr(model, "score", None)
        self._activation = _choose_activation(model, read)
        self._has_types = getattr(model.config, "type_vocab_size", 0) > 1

    def __call__(self, batch: PaddedBatch) -> Tensor:
        """Return probabilities or scores, float32 `[rows, labels]`."""
        activated: Tensor = self._activation(self._logits(batch).float())
        return activated

    def _logits(self, batch: PaddedBatch) -> Tensor:
        inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
        if self._score:
            states = self.model.base_model(**inputs, use_cache=False).last_hidden_state
            scored: Tensor = self._score(batch.select_last(states))
            return scored
        types = {"token_type_ids": batch.type_ids} if self._has_types else {}
        logits: Tensor = self.model(**inputs, **types).logits
        return logits


def _read_labels(model: PreTrainedModel) -> list[str]:
    """Return the names of the model's outputs, in order."""
    names = {int(number): str(name) for number, name in (model.config.id2label or {}).items()}
    return [names[number] for number in range(len(names))]


def _choose_activation(model: PreTrainedModel, read: ReadJson) -> nn.Module:
    """Return the activation that makes probabilities of a model's logits.

    It is the one that a cross-encoder's files, which `read` reads, name, else that of the
    `problem_type`, else a sigmoid for one label and a softmax over several.
    """
    config = model.config
    if named := named_activation(vars(config), read):
        return build_activation(named)
    if config.problem_type in _BY_PROBLEM:
        return _BY_PROBLEM[config.problem_type]()
    return nn.Sigmoid() if config.num_labels == 1 else nn.Softmax(dim=-1)


class ClassifyEngine(UnaryEngine):
    """An `Engine` for a model directory with a sequence classification head.

    Each input gets one row: probabilities of labels for a text, or a score for a pair of texts.
    """

    @staticmethod
    def load_head(directory: Path, device: torch.device) -> Classifier:
        """Load a directory's classification model onto a device.

        Only local safetensors files are read. Raises what transformers raises for a directory that
        it cannot load, and `ArtifactRefused` for an unknown activation.
        """
        config = read_config(directory, device)
        model = load_checkpoint(AutoModelForSequenceClassification, directory, config)
        return Classifier(model.to(device).eval(), json_reader(directory))  # type: ignore[arg-type]
