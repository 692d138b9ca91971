"""Small configurations of any architecture of transformers."""

from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY, CONTEXT, WINDOW = 320, 256, 20
BOS, EOS, PAD = 257, 256, 1

# Values by the names that configurations have for them; each takes those that it knows.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_vocab", "vocab_size_or_config_json_file"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("embedding_size", "emb_dim", "embed_dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 96
    ),
    **dict.fromkeys(("ffn_hidden_size", "d_ff", "feed_forward_size", "hidden_dim"), 96),
    **dict.fromkeys(("shared_intermediate_size", "mlp_hidden_size", "d_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv"), 16),
    "rotary_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), CONTEXT),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_k", "num_selected_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    "sliding_window": WINDOW,
    "attention_window": 16,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "decoder_start_token_id": BOS,
    "forced_eos_token_id": None,
    "initializer_range": 0.3,  # spread logits: greedy choices are clear, and change
    "init_std": 0.3,
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
    "dropout": 0.0,
}


# What some classes want besides, or instead; `...` leaves the class's own default.
OVERRIDES: dict[str, dict[str, Any]] = {
    "BltConfig": {"vocab_size": 260},
    "CohereCompassConfig": {"layer_types": ["full_attention"] * 3},
    "CpmAntConfig": {"prompt_types": 2, "prompt_length": 4},
    "DbrxConfig": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "FalconH1Config": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16},
    "Gemma3nTextConfig": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "activation_sparsity_pattern": [0.0] * 3,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "Gemma4TextConfig": {"vocab_size_per_layer_input": VOCABULARY},
    "GPTNeoConfig": {
        "num_hidden_layers": ...,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
    },
    "Lfm2MoeConfig": {"layer_types": ["full_attention", "conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 8, "head_dim": 16},
    "MoshiConfig": {"audio_vocab_size": 64},
    "PerceiverConfig": {"num_latents": 8, "d_latents": 64, "num_self_attends_per_block": 2},
    "ReformerConfig": {"axial_pos_embds": False, "is_decoder": True},
    "XGLMConfig": {"pad_token_id": 1},
    "ZambaConfig": {"num_hidden_layers": ...},
    "Zamba2Config": {"num_hidden_layers": ...},
    "ZayaConfig": {"num_experts_per_tok": 1},
}


def tiny_config(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return a small configuration of a class, those of its parts included.

    Raises what the class raises for values that do not fit each other.
    """
    known = kind_parameters(kind)
    values = {name: value for name, value in SMALL.items() if name in known}
    parts = getattr(kind, "sub_configs", None) or {}
    whole = kind() if parts else None
    for name in parts:
        if isinstance(part := getattr(whole, name, None), PreTrainedConfig):
            values[name] = tiny_config(type(part)).to_dict()
    if "kv_lora_rank" in known:  # heads share one latent, and are expanded to as many
        values |= dict.fromkeys({"num_key_value_heads"} & known, values["num_attention_heads"])
    values |= OVERRIDES.get(kind.__name__, {})
    return kind(**{name: value for name, value in values.items() if value is not ...})


def kind_parameters(kind: type[PreTrainedConfig]) -> set[str]:
    """Return the names that a configuration class takes, those it calls otherwise included."""
    names = set(signature(kind.__init__).parameters)
    if is_dataclass(kind):
        names |= {field.name for field in fields(kind)}
    return names | set(kind.attribute_map)
