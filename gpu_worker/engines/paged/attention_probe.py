"""Runs one token through a model, to find what each layer's attention is asked for.

Masks tell more than configurations: while the probe runs, transformers makes its masks by
`_make_mask`, which asks the mask's own function how far back a token sees.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gpu_worker.engines.checkpoints.loading import refuse_model
from gpu_worker.engines.device_memory import is_out_of_memory
from gpu_worker.engines.paged.attention.paged_attention import KvLayerSpec
from gpu_worker.engines.paged.batch.sequence_state import SlidingWindow

PROBE_ATTENTION = "millstream_probe"
FAR = 1 << 22  # a position behind all windows
NO_WINDOW, ODD_MASK = 0.0, 0.5  # values of a mask; a window is its negative number of tokens


def probe_kv_layers(model: PreTrainedModel) -> list[KvLayerSpec]:
    """Run one token through a model; return each layer's KV shape and window, in layer order.

    The run finds what configurations do not tell: attention sinks, soft caps, position biases,
    masks of a model's own, attention that is computed twice in a layer, layers that keep another
    kind of state. Raises `UnsupportedModel` for these, and if the model's attention function cannot
    be replaced. The model is left with the probe as its attention function, so the caller must set
    another one.
    """
    seen_layers: dict[int, KvLayerSpec] = {}
    name = type(model).__name__

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None, **options: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        _check_attention_call(name, module, key, value, options)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if layer in seen_layers:
            raise refuse_model(name, "it has attention that is computed twice in a layer")
        window = _read_window(name, attention_mask, options.get("sliding_window"))
        seen_layers[layer] = KvLayerSpec(key.shape[1], key.shape[3], window)
        return sdpa_attention_forward(module, query, key, value, None, **options)  # type: ignore[arg-type]

    AttentionInterface.register(PROBE_ATTENTION, probe)
    AttentionMaskInterface.register(PROBE_ATTENTION, _make_mask)
    _set_attention(model, PROBE_ATTENTION)
    _compute_one_token(model)
    count = model.config.get_text_config().num_hidden_layers
    if sorted(seen_layers) != list(range(count)):
        raise refuse_model(name, f"{len(seen_layers)} of its {count} layers use attention")
    layers = [seen_layers[index] for index in range(count)]
    _check_cache(model, layers)
    return layers


@torch.inference_mode()
def _compute_one_token(model: PreTrainedModel) -> None:
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        model(input_ids=ids, position_ids=ids, use_cache=False)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        reason = f"it cannot compute one token: {type(error).__name__}: {str(error)[:300]}"
        raise refuse_model(type(model).__name__, reason) from error


def _make_mask(
    *,
    mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    device: torch.device | str = "cpu",
    **_: object,
) -> Tensor | None:
    """Return, in the place of a mask `[1, 1, 1, 1]`, how far back a token sees; None if unknown."""

    def find_window(position: int) -> SlidingWindow:
        def sees(key: int) -> bool:
            places = (torch.tensor(place, device=device) for place in (0, 0, position, key))
            return bool(mask_function(*places))

        if sees(0):
            return None
        return position + 1 - bisect_left(range(position + 1), True, key=sees)

    try:
        windows = {find_window(FAR), find_window(FAR + 7)}
    except IndexError:  # it looks its tokens up, so it cannot be asked about others
        return None
    value = ODD_MASK if len(windows) > 1 else -float(windows.pop() or NO_WINDOW)
    return torch.full((1, 1, 1, 1), value, device=device)


def _read_window(name: str, mask: Tensor | None, option: object) -> SlidingWindow:
    """Return the window of a layer: its mask's, or the one it passes on where there is no mask."""
    if mask is None:
        return option if isinstance(option, int) else None
    value = float(mask.flatten()[0])
    if mask.numel() > 1 or value > 0 or not value.is_integer():
        raise refuse_model(name, "it has masks of its own")
    return int(-value) or None


def _check_cache(model: PreTrainedModel, layers: list[KvLayerSpec]) -> None:
    """Raise `UnsupportedModel` if transformers' cache drops tokens that the attention sees."""
    cache = DynamicCache(config=model.config.get_text_config())
    for index, (cached, layer) in enumerate(zip(cache.layers, layers, strict=False)):
        kept = getattr(cached, "sliding_window", None)
        if kept is not None and (layer.window is None or kept < layer.window):
            sees = layer.window or "all"
            reason = f"the cache of layer {index} keeps {kept} tokens where attention sees {sees}"
            raise refuse_model(type(model).__name__, reason)


def _check_attention_call(
    name: str, module: nn.Module, key: Tensor, value: Tensor, options: dict[str, object]
) -> None:
    reasons = {
        "soft-capped attention": options.get("softcap") is not None,
        "attention sinks": options.get("s_aux") is not None,
        "position biases": options.get("position_bias") is not None,
        "keys and values of different sizes": key.shape != value.shape,
        "bidirectional attention": not getattr(module, "is_causal", True),
    }
    for reason, present in reasons.items():
        if present:
            raise refuse_model(name, f"it has {reason}")


def _set_attention(model: PreTrainedModel, name: str) -> None:
    try:
        model.set_attn_implementation(name)
    except ValueError as error:
        raise refuse_model(type(model).__name__, "its attention cannot be replaced") from error
    config = model.config.get_text_config()
    if config._attn_implementation != name:
        raise refuse_model(type(model).__name__, "its attention cannot be replaced")
