"""Reads the files of sentence-transformers, of encoders and rerankers: modules, prompts, limits.

Worker, gateway and registry read them here, so that none of them takes what another one refuses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from registry.artifact_verification import ArtifactRefused, ReadJson, positive, read_object
from registry.models import EngineKind
from registry.tokenizer.token_types import marks_second_text

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
# The older flags, in the order in which the vectors of several modes are joined
_POOLING_FLAGS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
DEFAULT_MODES: tuple[PoolingMode, ...] = ("mean",)
LAYERS = ("Dense", "LayerNorm", "Normalize", "Dropout")
ACTIVATIONS = ("Identity", "Sigmoid", "Tanh", "ReLU", "GELU", "SiLU")  # classes of torch.nn
_MODULES, _SETTINGS = "modules.json", "config_sentence_transformers.json"
_TRANSFORMER_SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True)
class _ModelKind:
    """Sentence-transformers' names for a kind of model, its transformer's task, and the output."""

    model_type: str
    task: str
    output: str


_KINDS: dict[EngineKind, _ModelKind] = {
    "embed": _ModelKind("SentenceTransformer", "feature-extraction", "last_hidden_state"),
    "classify": _ModelKind("CrossEncoder", "sequence-classification", "logits"),
}


@dataclass(frozen=True)
class TextSettings:
    """Settings by which texts become the input of a sentence encoder or reranker.

    `prompt` is put before a text, or the first one of a pair; texts are lowered if `lower_case` is
    set. Tokens of a pair's second text have another type if `marks_second_text` is set.
    `max_tokens` is the longest input that the model was made for, None if it does not say.
    """

    prompt: str = ""
    lower_case: bool = False
    marks_second_text: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True)
class VectorLayer:
    """A module behind the pooling, with its settings; its files are in `path`."""

    kind: str
    path: str
    settings: dict[str, Any]

    @property
    def file(self) -> str:
        """The path of the layer's own config.json."""
        return f"{self.path}/config.json"

    def read_tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that the layer consists of, by name.

        Raises `ArtifactRefused` if its config.json does not say them.
        """
        if self.kind == "LayerNorm":
            size = self._read_size("dimension")
            return {"norm.weight": (size,), "norm.bias": (size,)}
        if self.kind != "Dense":
            return {}
        inputs, outputs = self._read_size("in_features"), self._read_size("out_features")
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (outputs, inputs)}
        if self._read_flag("bias", default=True):
            shapes["linear.bias"] = (outputs,)
        if self.has_residual() and inputs != outputs:
            shapes["residual.weight"] = (outputs, inputs)
        return shapes

    def read_activation(self) -> str:
        """Return the name of a dense layer's activation, one of `ACTIVATIONS`.

        Raises `ArtifactRefused` if its config.json names another one.
        """
        path = self.settings.get("activation_function", "torch.nn.modules.activation.Tanh")
        return read_activation(path, self.file)

    def has_residual(self) -> bool:
        """Return whether a dense layer's output is added to its input, or to a projection of it.

        Raises `ArtifactRefused` if its config.json does not say so by true or false.
        """
        return self._read_flag("use_residual", default=False)

    def _read_size(self, key: str) -> int:
        found = self.settings.get(key)
        if (size := positive(found)) is None:
            raise ArtifactRefused(self.file, f"has {key} {found!r}, which is no size")
        return size

    def _read_flag(self, key: str, *, default: bool) -> bool:
        found = self.settings.get(key, default)
        if not isinstance(found, bool):
            raise ArtifactRefused(self.file, f"has {key} {found!r}, which is not true or false")
        return found


@dataclass(frozen=True)
class VectorModules:
    """Steps from token states to a vector: pooled by each of `modes` and joined, then `layers`.

    At last it is cut to `truncate_dim`, unless that is None.
    """

    modes: tuple[PoolingMode, ...]
    layers: tuple[VectorLayer, ...]
    truncate_dim: int | None

    def dimensions(self, hidden_size: int) -> int:
        """Return the width of the vectors of an encoder whose states have `hidden_size` numbers.

        Raises `ArtifactRefused` for a layer that takes vectors of another width.
        """
        width = len(self.modes) * hidden_size
        for layer in self.layers:
            for name, shape in layer.read_tensor_shapes().items():
                if name.endswith("weight") and shape[-1] != width:
                    reason = f"takes vectors of {shape[-1]} numbers, they have {width} there"
                    raise ArtifactRefused(layer.file, reason)
            if layer.kind == "Dense":
                width = layer.read_tensor_shapes()["linear.weight"][0]
        return min(width, self.truncate_dim or width)


def read_activation(path: object, file: str) -> str:
    """Return the name of the activation at a path such as `torch.nn.modules.linear.Identity`.

    `file` is what names it. Raises `ArtifactRefused` for any that is not one of `ACTIVATIONS`.
    """
    name = str(path).rpartition(".")[2]
    if not str(path).startswith("torch.nn.") or name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ArtifactRefused(file, f"names the activation {path!r}; {known} of torch.nn are known")
    return name


def is_sentence_encoder(read: ReadJson) -> bool:
    """Return whether a directory's modules make vectors of texts, whatever its architecture is."""
    return any(_kind_of(module) == "Pooling" for module in read(_MODULES) or ())


def read_text_settings(read: ReadJson, engine: EngineKind) -> TextSettings:
    """Return what a model's files say is done to texts before its `embed` or `classify` engine.

    A classifier without modules.json is one of transformers alone, which reads none of the files of
    sentence-transformers. Raises `ArtifactRefused` for settings that make other inputs of texts
    than this engine, and if the default prompt is not among the prompts.
    """
    if engine == "classify" and not read(_MODULES):
        return TextSettings(marks_second_text=marks_second_text(read))
    name, transformer = _transformer_settings(read)
    _check_transformer(name, transformer, _KINDS[engine])
    settings = read_object(read, _SETTINGS)
    _check_model_type(settings, _KINDS[engine])
    limit = transformer.get("max_seq_length")
    return TextSettings(
        _default_prompt(settings),
        bool(transformer.get("do_lower_case")),
        marks_second_text(read),
        positive(limit),
    )


def read_reranker_activation(read: ReadJson) -> str | None:
    """Return the activation that a reranker's files name beside config.json; None if none does.

    Raises `ArtifactRefused` for modules other than one transformer, and an unknown activation.
    """
    modules = read(_MODULES)
    if not modules:
        return None
    if [_kind_of(module) for module in modules] != ["Transformer"] or modules[0].get("path"):
        kinds = ", ".join(map(_kind_of, modules))
        reason = f"has the modules {kinds}: a classifier has one Transformer (path: '')"
        raise ArtifactRefused(_MODULES, reason)
    path = read_object(read, _SETTINGS).get("activation_fn")
    return read_activation(path, _SETTINGS) if path else None


def read_vector_modules(read: ReadJson) -> VectorModules:
    """Return how an encoder's files say that vectors are made.

    Without a pooling module it is the mean of all tokens. Raises `ArtifactRefused` for a module, a
    pooling mode or an order of modules that is not supported.
    """
    modules = [_read_module(read, module) for module in read(_MODULES) or ()]
    kinds = [module.kind for module in modules]
    if unknown := sorted({*kinds} - {"Transformer", "Pooling", *LAYERS}):
        raise ArtifactRefused(_MODULES, f"has modules unknown here: {', '.join(unknown)}")
    if kinds[:1] != ["Transformer"] or kinds.count("Transformer") > 1 or modules[0].path:
        raise ArtifactRefused(
            _MODULES,
            "must begin with one Transformer, whose files are at the top (path: '')",
        )
    pooling = [module for module in modules if module.kind == "Pooling"]
    if (pooling and kinds[1] != "Pooling") or len(pooling) > 1:
        raise ArtifactRefused(_MODULES, "must have one Pooling, behind the Transformer")
    layers = tuple(module for module in modules if module.kind in LAYERS)
    for layer in layers:
        _check_layer(layer)
    settings = read_object(read, _SETTINGS)
    prompt = _default_prompt(settings)
    modes = tuple(_read_modes(pooling[0], prompt)) if pooling else DEFAULT_MODES
    return VectorModules(modes, layers, _truncate_dim(settings))


def _transformer_settings(read: ReadJson) -> tuple[str, dict[str, Any]]:
    """Return the name and content of the first file of settings that has any."""
    for name in _TRANSFORMER_SETTINGS:
        if content := read_object(read, name):
            return name, content
    return _TRANSFORMER_SETTINGS[0], {}


def _check_transformer(name: str, settings: dict[str, Any], kind: _ModelKind) -> None:
    """Raise `ArtifactRefused` unless a transformer makes its output of texts, in the usual way."""
    task = settings.get("transformer_task", kind.task)
    if task != kind.task:
        raise ArtifactRefused(name, f"has the transformer_task {task!r}, not {kind.task!r}")
    usual = {"method": "forward", "method_output_name": kind.output}
    modalities = settings.get("modality_config") or {"text": usual}
    text = modalities.get("text") if isinstance(modalities, dict) else None
    if not isinstance(text, dict) or {**text, **usual} != text:
        reason = f"{text!r} for text: forward to {kind.output} is run, without a chat template"
        raise ArtifactRefused(name, f"has in modality_config {reason}")
    if changed := settings.get("processing_kwargs"):
        raise ArtifactRefused(name, f"has processing_kwargs {changed!r}, which are not supported")


def _check_model_type(settings: dict[str, Any], kind: _ModelKind) -> None:
    """Raise `ArtifactRefused` for a model of another kind, such as one vector for each token."""
    found = settings.get("model_type", kind.model_type)
    if found != kind.model_type:
        reason = f"has the model_type {found!r}: only {kind.model_type} is run with these modules"
        raise ArtifactRefused(_SETTINGS, reason)


def _default_prompt(settings: dict[str, Any]) -> str:
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise ArtifactRefused(_SETTINGS, f"prompts is {prompts!r}, not an object")
    if name is None:
        return ""
    if not isinstance(name, str) or name not in prompts:
        known = ", ".join(prompts) or "none"
        raise ArtifactRefused(_SETTINGS, f"default_prompt_name {name!r} is no prompt: {known}")
    return str(prompts[name] or "")


def _truncate_dim(settings: dict[str, Any]) -> int | None:
    found = settings.get("truncate_dim")
    if found is not None and positive(found) is None:
        raise ArtifactRefused(_SETTINGS, f"truncate_dim {found!r} is not a number above 0")
    return found


def _read_module(read: ReadJson, module: dict[str, Any]) -> VectorLayer:
    path = str(module.get("path") or "").strip("/")
    settings = read_object(read, f"{path}/config.json") if path else {}
    return VectorLayer(_kind_of(module), path, settings)


def _kind_of(module: dict[str, Any]) -> str:
    """Return the name of a module's class, from a path such as `sentence_transformers…Pooling`."""
    return str(module["type"]).rpartition(".")[2]


def _check_layer(layer: VectorLayer) -> None:
    """Raise `ArtifactRefused` for a layer over single tokens, or with unknown settings."""
    for key in ("module_input_name", "module_output_name"):
        if layer.settings.get(key) not in (None, "sentence_embedding"):
            reason = f"has {key} {layer.settings[key]!r}: layers over single tokens are not run"
            raise ArtifactRefused(layer.file, reason)
    if layer.kind == "Dense":
        layer.read_activation()
    layer.read_tensor_shapes()


def _read_modes(pooling: VectorLayer, prompt: str) -> Iterator[PoolingMode]:
    file, settings = f"{pooling.path}/config.json", pooling.settings
    if settings.get("include_prompt") is False and prompt:
        raise ArtifactRefused(
            file, "leaves the prompt out of the vector (include_prompt), which is not supported"
        )
    found = settings.get("pooling_mode")
    if found is None:
        found = [
            mode for flag, mode in _POOLING_FLAGS.items() if settings.get(flag)
        ] or DEFAULT_MODES
    for mode in found if isinstance(found, list | tuple) else [found]:
        if mode not in POOLING_MODES:
            possible = ", ".join(POOLING_MODES)
            raise ArtifactRefused(file, f"asks for the pooling {mode!r}; {possible} are possible")
        yield mode
