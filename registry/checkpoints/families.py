"""Tensors of the model families whose names are known, with their shapes, as tables of text.

A line has a tensor's name without the base model's prefix, `*` for the layer's number, and its
shape in the words of `model_dimensions`. `tests/engine/test_checkpoint_families.py` compares every
family with transformers. Of families that are not here, nothing is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_EMBEDDINGS = """
embed_tokens.weight                            vocab hidden
norm.weight                                    hidden
"""
_PROJECTIONS = """
layers.*.self_attn.q_proj.weight               q hidden
layers.*.self_attn.k_proj.weight               kv hidden
layers.*.self_attn.v_proj.weight               kv hidden
layers.*.self_attn.o_proj.weight               hidden q
"""
_QKV_BIASES = """
layers.*.self_attn.q_proj.bias                 q
layers.*.self_attn.k_proj.bias                 kv
layers.*.self_attn.v_proj.bias                 kv
"""
_O_BIAS = """
layers.*.self_attn.o_proj.bias                 hidden
"""
_HEAD_NORMS = """
layers.*.self_attn.q_norm.weight               head_dim
layers.*.self_attn.k_norm.weight               head_dim
"""
_WIDE_NORMS = """
layers.*.self_attn.q_norm.weight               q
layers.*.self_attn.k_norm.weight               kv
"""
_GATED_MLP = """
layers.*.mlp.gate_proj.weight                  ffn hidden
layers.*.mlp.up_proj.weight                    ffn hidden
layers.*.mlp.down_proj.weight                  hidden ffn
"""
_MLP_BIASES = """
layers.*.mlp.gate_proj.bias                    ffn
layers.*.mlp.up_proj.bias                      ffn
layers.*.mlp.down_proj.bias                    hidden
"""
_FUSED_MLP = """
layers.*.mlp.gate_up_proj.weight               2ffn hidden
layers.*.mlp.down_proj.weight                  hidden ffn
"""
_INPUT_NORM = """
layers.*.input_layernorm.weight                hidden
"""
_ATTENTION_NORM = """
layers.*.post_attention_layernorm.weight       hidden
"""
_MLP_NORM = """
layers.*.post_feedforward_layernorm.weight     hidden
"""
_NORMS = _INPUT_NORM + _ATTENTION_NORM
_FOUR_NORMS = _NORMS + _MLP_NORM + """
layers.*.pre_feedforward_layernorm.weight      hidden
"""  # fmt: skip
_DENSE = _EMBEDDINGS + _PROJECTIONS + _GATED_MLP
_LLAMA = _DENSE + _NORMS
_ROUTER = """
layers.*.mlp.gate.weight                       experts hidden
"""
_PHI3 = _EMBEDDINGS + _FUSED_MLP + _NORMS + """
layers.*.self_attn.qkv_proj.weight             q+2kv hidden
layers.*.self_attn.o_proj.weight               hidden q
"""  # fmt: skip
_GLM = _EMBEDDINGS + _PROJECTIONS + _FUSED_MLP + _NORMS
_GPT_NEOX = """
embed_in.weight                                vocab hidden
final_layer_norm.weight                        hidden
final_layer_norm.bias                          hidden
layers.*.input_layernorm.weight                hidden
layers.*.input_layernorm.bias                  hidden
layers.*.post_attention_layernorm.weight       hidden
layers.*.post_attention_layernorm.bias         hidden
layers.*.attention.query_key_value.weight      3hidden hidden
layers.*.attention.dense.weight                hidden hidden
layers.*.mlp.dense_h_to_4h.weight              ffn hidden
layers.*.mlp.dense_h_to_4h.bias                ffn
layers.*.mlp.dense_4h_to_h.weight              hidden ffn
layers.*.mlp.dense_4h_to_h.bias                hidden
"""
_GPT_NEOX_BIASES = """
layers.*.attention.query_key_value.bias        3hidden
layers.*.attention.dense.bias                  hidden
"""
_GPT2 = """
wte.weight                                     vocab hidden
wpe.weight                                     positions hidden
ln_f.weight                                    hidden
ln_f.bias                                      hidden
h.*.ln_1.weight                                hidden
h.*.ln_1.bias                                  hidden
h.*.attn.c_attn.weight                         hidden 3hidden
h.*.attn.c_attn.bias                           3hidden
h.*.attn.c_proj.weight                         hidden hidden
h.*.attn.c_proj.bias                           hidden
h.*.ln_2.weight                                hidden
h.*.ln_2.bias                                  hidden
h.*.mlp.c_fc.weight                            hidden ffn
h.*.mlp.c_fc.bias                              ffn
h.*.mlp.c_proj.weight                          ffn hidden
h.*.mlp.c_proj.bias                            hidden
"""
_PHI = """
embed_tokens.weight                            vocab hidden
final_layernorm.weight                         hidden
final_layernorm.bias                           hidden
layers.*.self_attn.q_proj.weight               q hidden
layers.*.self_attn.k_proj.weight               kv hidden
layers.*.self_attn.v_proj.weight               kv hidden
layers.*.self_attn.dense.weight                hidden q
layers.*.self_attn.dense.bias                  hidden
layers.*.mlp.fc1.weight                        ffn hidden
layers.*.mlp.fc1.bias                          ffn
layers.*.mlp.fc2.weight                        hidden ffn
layers.*.mlp.fc2.bias                          hidden
layers.*.input_layernorm.weight                hidden
layers.*.input_layernorm.bias                  hidden
""" + _QKV_BIASES  # fmt: skip
_BERT_EMBEDDINGS = """
embeddings.word_embeddings.weight              vocab hidden
embeddings.position_embeddings.weight          positions hidden
embeddings.LayerNorm.weight                    hidden
embeddings.LayerNorm.bias                      hidden
"""
_TYPE_EMBEDDINGS = """
embeddings.token_type_embeddings.weight        types hidden
"""
_BERT_FEED_FORWARD = """
encoder.layer.*.intermediate.dense.weight      ffn hidden
encoder.layer.*.intermediate.dense.bias        ffn
encoder.layer.*.output.dense.weight            hidden ffn
encoder.layer.*.output.dense.bias              hidden
encoder.layer.*.output.LayerNorm.weight        hidden
encoder.layer.*.output.LayerNorm.bias          hidden
"""
_BERT_LAYERS = _BERT_FEED_FORWARD + """
encoder.layer.*.attention.self.query.weight    hidden hidden
encoder.layer.*.attention.self.query.bias      hidden
encoder.layer.*.attention.self.key.weight      hidden hidden
encoder.layer.*.attention.self.key.bias        hidden
encoder.layer.*.attention.self.value.weight    hidden hidden
encoder.layer.*.attention.self.value.bias      hidden
encoder.layer.*.attention.output.dense.weight  hidden hidden
encoder.layer.*.attention.output.dense.bias    hidden
encoder.layer.*.attention.output.LayerNorm.weight  hidden
encoder.layer.*.attention.output.LayerNorm.bias    hidden
"""  # fmt: skip
_BERT = _BERT_EMBEDDINGS + _TYPE_EMBEDDINGS + _BERT_LAYERS
_MPNET = _BERT_EMBEDDINGS + _BERT_FEED_FORWARD + """
encoder.layer.*.attention.attn.q.weight        hidden hidden
encoder.layer.*.attention.attn.q.bias          hidden
encoder.layer.*.attention.attn.k.weight        hidden hidden
encoder.layer.*.attention.attn.k.bias          hidden
encoder.layer.*.attention.attn.v.weight        hidden hidden
encoder.layer.*.attention.attn.v.bias          hidden
encoder.layer.*.attention.attn.o.weight        hidden hidden
encoder.layer.*.attention.attn.o.bias          hidden
encoder.layer.*.attention.LayerNorm.weight     hidden
encoder.layer.*.attention.LayerNorm.bias       hidden
encoder.relative_attention_bias.weight         ? heads
"""  # fmt: skip
_DISTILBERT = _BERT_EMBEDDINGS + """
transformer.layer.*.attention.q_lin.weight     hidden hidden
transformer.layer.*.attention.q_lin.bias       hidden
transformer.layer.*.attention.k_lin.weight     hidden hidden
transformer.layer.*.attention.k_lin.bias       hidden
transformer.layer.*.attention.v_lin.weight     hidden hidden
transformer.layer.*.attention.v_lin.bias       hidden
transformer.layer.*.attention.out_lin.weight   hidden hidden
transformer.layer.*.attention.out_lin.bias     hidden
transformer.layer.*.sa_layer_norm.weight       hidden
transformer.layer.*.sa_layer_norm.bias         hidden
transformer.layer.*.ffn.lin1.weight            ffn hidden
transformer.layer.*.ffn.lin1.bias              ffn
transformer.layer.*.ffn.lin2.weight            hidden ffn
transformer.layer.*.ffn.lin2.bias              hidden
transformer.layer.*.output_layer_norm.weight   hidden
transformer.layer.*.output_layer_norm.bias     hidden
"""  # fmt: skip
_LM_HEAD = "lm_head.weight  vocab hidden"
_SCORE = "score.weight  labels hidden"
_CLASSIFIER = """
classifier.weight                              labels hidden
classifier.bias                                labels
"""
_POOLED_CLASSIFIER = _CLASSIFIER + """
pooler.dense.weight                            hidden hidden
pooler.dense.bias                              hidden
"""  # fmt: skip
_DISTILBERT_CLASSIFIER = _CLASSIFIER + """
pre_classifier.weight                          hidden hidden
pre_classifier.bias                            hidden
"""  # fmt: skip
_TWO_LAYER_CLASSIFIER = """
classifier.dense.weight                        hidden hidden
classifier.dense.bias                          hidden
classifier.out_proj.weight                     labels hidden
classifier.out_proj.bias                       labels
"""


@dataclass(frozen=True)
class Family:
    """The tensors of a model type, with what its configuration leaves out.

    `tensors` is the base model's table, `lm_head` and `classifier` those of the heads. `if_set` has
    more tensors by a key of config.json that must be true for them. `defaults` are transformers'
    values of absent keys, and `keys` this type's own names of keys. `prefix` is what a model with a
    head puts before the base model's names.
    """

    tensors: str
    prefix: str = "model"
    lm_head: str = _LM_HEAD
    classifier: str = _SCORE
    if_set: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)  # old to new parts of names


_TIED = {"tie_word_embeddings": True}
_BIASES = {"attention_bias": _QKV_BIASES + _O_BIAS}
_GEMMA = _TIED | {"head_dim": 256}
_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_ROBERTA = Family(_BERT, "roberta", "", _TWO_LAYER_CLASSIFIER, renamed=_OLD_NORMS)

FAMILIES = {
    "llama": Family(_LLAMA, if_set=_BIASES | {"mlp_bias": _MLP_BIASES}),
    "granite": Family(_LLAMA, if_set=_BIASES | {"mlp_bias": _MLP_BIASES}),
    "smollm3": Family(_LLAMA, if_set=_BIASES | {"mlp_bias": _MLP_BIASES}, defaults=_TIED),
    "mistral": Family(_LLAMA),
    "qwen2": Family(_LLAMA + _QKV_BIASES),
    "qwen3": Family(_LLAMA + _HEAD_NORMS, if_set=_BIASES, defaults={"head_dim": 128}),
    "gemma": Family(_LLAMA, if_set=_BIASES, defaults=_GEMMA),
    "gemma2": Family(_DENSE + _FOUR_NORMS, if_set=_BIASES, defaults=_GEMMA),
    "gemma3_text": Family(_DENSE + _FOUR_NORMS + _HEAD_NORMS, if_set=_BIASES, defaults=_GEMMA),
    "olmo2": Family(_DENSE + _ATTENTION_NORM + _MLP_NORM + _WIDE_NORMS, if_set=_BIASES),
    "olmo3": Family(_DENSE + _ATTENTION_NORM + _MLP_NORM + _WIDE_NORMS, if_set=_BIASES),
    "exaone4": Family(_DENSE + _ATTENTION_NORM + _MLP_NORM + _HEAD_NORMS),
    "cohere2": Family(_DENSE + _INPUT_NORM, if_set=_BIASES, defaults=_TIED | {"head_dim": 128}),
    "phi3": Family(_PHI3),
    "glm": Family(
        _GLM,
        if_set={"attention_bias": _QKV_BIASES},
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "glm4": Family(
        _GLM
        + """
        layers.*.post_self_attn_layernorm.weight  hidden
        layers.*.post_mlp_layernorm.weight        hidden
        """,
        if_set={"attention_bias": _QKV_BIASES},
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "phi": Family(_PHI, lm_head=_LM_HEAD + "\nlm_head.bias  vocab"),
    "gpt_neox": Family(
        _GPT_NEOX,
        "gpt_neox",
        if_set={"attention_bias": _GPT_NEOX_BIASES},
        defaults={"attention_bias": True},
        renamed={"embed_out.": "lm_head."},
    ),
    "gpt2": Family(
        _GPT2,
        "transformer",
        defaults=_TIED,
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
        },
    ),
    "mixtral": Family(
        _EMBEDDINGS + _PROJECTIONS + _NORMS + _ROUTER,
        keys={"num_experts": "num_local_experts"},
        renamed={".block_sparse_moe.": ".mlp."},
    ),
    "qwen3_moe": Family(_EMBEDDINGS + _PROJECTIONS + _NORMS + _HEAD_NORMS, if_set=_BIASES),
    "bert": Family(_BERT, "bert", "", _POOLED_CLASSIFIER, renamed=_OLD_NORMS),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": Family(_MPNET, "mpnet", "", _TWO_LAYER_CLASSIFIER, renamed=_OLD_NORMS),
    "distilbert": Family(
        _DISTILBERT,
        "distilbert",
        "",
        _DISTILBERT_CLASSIFIER,
        keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
        },
        renamed=_OLD_NORMS,
    ),
}
