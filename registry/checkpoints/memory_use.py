"""Says what a checkpoint takes in memory once loaded: weights, and keys and values by token."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from registry.artifact_verification import positive
from registry.checkpoints.completeness import model_dimensions, read_key
from registry.checkpoints.families import FAMILIES, Family
from registry.checkpoints.model_types import text_settings
from registry.checkpoints.safetensors_header import DTYPE_BITS, Tensors

FLOAT_DTYPES = frozenset(name for name in DTYPE_BITS if name.startswith(("F", "BF")))

_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_OTHER = Family("")  # of model types that are not known: config.json has the common keys


@dataclass(frozen=True)
class KvLayer:
    """Keys and values that one attention layer keeps: heads and their size for each token.

    `window` is the number of tokens of which it keeps them; None: of all.
    """

    kv_heads: int
    head_dim: int
    window: int | None

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of one token's key and value."""
        return 2 * self.kv_heads * self.head_dim * itemsize


def loaded_bytes(
    tensors: Tensors, itemsize: int, scaled: Collection[str] = (), unused: Collection[str] = ()
) -> int:
    """Return the bytes of a checkpoint's tensors once they are loaded in a dtype of `itemsize`.

    Floating point tensors take that dtype, as do those named in `scaled`, which are multiplied
    out; others keep their own. Those in `unused` are not loaded.
    """
    return sum(
        tensor.numel * itemsize
        if name in scaled or tensor.dtype in FLOAT_DTYPES
        else tensor.end - tensor.start
        for name, tensor in tensors.items()
        if name not in unused
    )


def tied_head_elements(tensors: Tensors) -> int:
    """Return the size of the embeddings that serve as the output head; 0 if there is a head."""
    if any(name.endswith(_HEADS) for name in tensors):
        return 0
    embeddings = [tensor.numel for name, tensor in tensors.items() if name.endswith(_EMBEDDINGS)]
    return max(embeddings, default=0)


def kv_layers(config: Mapping[str, Any]) -> list[KvLayer]:
    """Return what each layer keeps of a token by config.json; empty if that does not say.

    Where config.json tells windows in no way that is known here, a layer keeps all tokens.
    """
    text = text_settings(config)
    family = FAMILIES.get(str(text.get("model_type")), _OTHER)
    dimensions = model_dimensions(family, text)
    layers = positive(read_key(family, text, "num_hidden_layers"))
    kv_heads = positive(read_key(family, text, "num_key_value_heads")) or dimensions["heads"]
    head_dim = dimensions["head_dim"]
    if not layers or not head_dim or not kv_heads:
        return []
    return [KvLayer(kv_heads, head_dim, window) for window in _windows(text, layers)]


def _windows(text: Mapping[str, Any], layers: int) -> list[int | None]:
    window = positive(text.get("sliding_window"))
    types = text.get("layer_types")
    if window is None or text.get("use_sliding_window") is False:
        return [None] * layers
    if isinstance(types, list) and len(types) == layers:
        return [window if kind == "sliding_attention" else None for kind in types]
    pattern = positive(text.get("sliding_window_pattern") or text.get("_sliding_window_pattern"))
    if pattern:  # each pattern's last layer sees all
        return [window if (number + 1) % pattern else None for number in range(layers)]
    return [window if text.get("model_type") == "mistral" else None] * layers
