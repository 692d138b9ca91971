"""Tensors of the model families whose names are known, with their shapes, as tables of text.

A line has a tensor's name without the base model's prefix, `*` for the layer's number, and its
shape in the words of `model_dimensions`. `tests/engine/test_checkpoint_families.py` compares every
family with transformers. Of families that are not here, nothing is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


def _biases(table: str) -> str:
    """Return a table of the biases that go with a table's weights: one number for each row."""
    rows = (line.split() for line in table.splitlines() if line)
    return "".join(f"{row[0].removesuffix('weight')}bias  {row[1]}\n" for row in rows)


def _biased(table: str) -> str:
    """Return a table of weights with the bias of each."""
    return table + _biases(table)


_EMBEDDINGS = """
embed_tokens.weight                            vocab hidden
norm.weight                                    hidden
"""
_QKV = """
layers.*.self_attn.q_proj.weight               q hidden
layers.*.self_attn.k_proj.weight               kv hidden
layers.*.self_attn.v_proj.weight               kv hidden
"""
_O = """
layers.*.self_attn.o_proj.weight               hidden q
"""
_PROJECTIONS = _QKV + _O
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
_PHI3 = _EMBEDDINGS + _FUSED_MLP + _NORMS + _O + """
layers.*.self_attn.qkv_proj.weight             q+2kv hidden
"""  # fmt: skip
_GLM = _EMBEDDINGS + _PROJECTIONS + _FUSED_MLP + _NORMS
_GLM4_NORMS = """
layers.*.post_self_attn_layernorm.weight       hidden
layers.*.post_mlp_layernorm.weight             hidden
"""
_GPT_NEOX_EMBEDDINGS = """
embed_in.weight                                vocab hidden
"""
_GPT_NEOX_ATTENTION = """
layers.*.attention.query_key_value.weight      3hidden hidden
layers.*.attention.dense.weight                hidden hidden
"""
_GPT_NEOX_BIASED = _NORMS + """
final_layer_norm.weight                        hidden
layers.*.mlp.dense_h_to_4h.weight              ffn hidden
layers.*.mlp.dense_4h_to_h.weight              hidden ffn
"""  # fmt: skip
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
_PHI_EMBEDDINGS = """
embed_tokens.weight                            vocab hidden
"""
_PHI = _QKV + _INPUT_NORM + """
final_layernorm.weight                         hidden
layers.*.self_attn.dense.weight                hidden q
layers.*.mlp.fc1.weight                        ffn hidden
layers.*.mlp.fc2.weight                        hidden ffn
"""  # fmt: skip
_BERT_EMBEDDINGS = """
embeddings.word_embeddings.weight              vocab hidden
embeddings.position_embeddings.weight          positions hidden
"""
_TYPE_EMBEDDINGS = """
embeddings.token_type_embeddings.weight        types hidden
"""
_EMBEDDINGS_NORM = """
embeddings.LayerNorm.weight                    hidden
"""
_FEED_FORWARD = """
encoder.layer.*.intermediate.dense.weight      ffn hidden
encoder.layer.*.output.dense.weight            hidden ffn
encoder.layer.*.output.LayerNorm.weight        hidden
"""
_BERT = _EMBEDDINGS_NORM + _FEED_FORWARD + """
encoder.layer.*.attention.self.query.weight    hidden hidden
encoder.layer.*.attention.self.key.weight      hidden hidden
encoder.layer.*.attention.self.value.weight    hidden hidden
encoder.layer.*.attention.output.dense.weight  hidden hidden
encoder.layer.*.attention.output.LayerNorm.weight  hidden
"""  # fmt: skip
_MPNET = _EMBEDDINGS_NORM + _FEED_FORWARD + """
encoder.layer.*.attention.attn.q.weight        hidden hidden
encoder.layer.*.attention.attn.k.weight        hidden hidden
encoder.layer.*.attention.attn.v.weight        hidden hidden
encoder.layer.*.attention.attn.o.weight        hidden hidden
encoder.layer.*.attention.LayerNorm.weight     hidden
"""  # fmt: skip
_RELATIVE_POSITIONS = """
encoder.relative_attention_bias.weight         ? heads
"""
_DISTILBERT = _EMBEDDINGS_NORM + """
transformer.layer.*.attention.q_lin.weight     hidden hidden
transformer.layer.*.attention.k_lin.weight     hidden hidden
transformer.layer.*.attention.v_lin.weight     hidden hidden
transformer.layer.*.attention.out_lin.weight   hidden hidden
transformer.layer.*.sa_layer_norm.weight       hidden
transformer.layer.*.ffn.lin1.weight            ffn hidden
transformer.layer.*.ffn.lin2.weight            hidden ffn
transformer.layer.*.output_layer_norm.weight   hidden
"""  # fmt: skip
_LM_HEAD = """
lm_head.weight                                 vocab hidden
"""
_SCORE = """
score.weight                                   labels hidden
"""
_CLASSIFIER = """
classifier.weight                              labels hidden
"""
_POOLED_CLASSIFIER = _CLASSIFIER + """
pooler.dense.weight                            hidden hidden
"""  # fmt: skip
_DISTILBERT_CLASSIFIER = _CLASSIFIER + """
pre_classifier.weight                          hidden hidden
"""  # fmt: skip
_TWO_LAYER_CLASSIFIER = """
classifier.dense.weight                        hidden hidden
classifier.out_proj.weight                     labels hidden
"""


@dataclass(frozen=True)
class Family:
    """The tensors of a model type.

    `tensors` is the base model's table, `lm_head` and `classifier` those of the heads. `if_set` has
    more tensors by a key of config.json that must be true for them. `keys` are this type's own
    names of keys, beside those that transformers translates. `prefix` is what a model with a head
    puts before the base model's names. Where config.json names no feed-forward width, it is
    `ffn_factor` times the hidden size.
    """

    tensors: str
    prefix: str = "model"
    lm_head: str = _LM_HEAD
    classifier: str = _SCORE
    if_set: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)  # old to new parts of names
    ffn_factor: int | None = None


_QKV_BIASES = {"attention_bias": _biases(_QKV)}
_BIASES = {"attention_bias": _biases(_PROJECTIONS)}
_ALL_BIASES = _BIASES | {"mlp_bias": _biases(_GATED_MLP)}
_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_BERT_TENSORS = _BERT_EMBEDDINGS + _TYPE_EMBEDDINGS + _biased(_BERT)
_TWO_LAYERS = _biased(_TWO_LAYER_CLASSIFIER)
_ROBERTA = Family(_BERT_TENSORS, "roberta", "", _TWO_LAYERS, renamed=_OLD_NORMS)
_OLMO = Family(_DENSE + _ATTENTION_NORM + _MLP_NORM + _WIDE_NORMS, if_set=_BIASES)

FAMILIES = {
    "llama": Family(_LLAMA, if_set=_ALL_BIASES),
    "granite": Family(_LLAMA, if_set=_ALL_BIASES),
    "smollm3": Family(_LLAMA, if_set=_ALL_BIASES),
    "mistral": Family(_LLAMA),
    "qwen2": Family(_LLAMA + _biases(_QKV)),
    "qwen3": Family(_LLAMA + _HEAD_NORMS, if_set=_BIASES),
    "gemma": Family(_LLAMA, if_set=_BIASES),
    "gemma2": Family(_DENSE + _FOUR_NORMS, if_set=_BIASES),
    "gemma3_text": Family(_DENSE + _FOUR_NORMS + _HEAD_NORMS, if_set=_BIASES),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "exaone4": Family(_DENSE + _ATTENTION_NORM + _MLP_NORM + _HEAD_NORMS),
    "cohere2": Family(_DENSE + _INPUT_NORM, if_set=_BIASES),
    "phi3": Family(_PHI3),
    "glm": Family(_GLM, if_set=_QKV_BIASES),
    "glm4": Family(_GLM + _GLM4_NORMS, if_set=_QKV_BIASES),
    "phi": Family(_PHI_EMBEDDINGS + _biased(_PHI), lm_head=_biased(_LM_HEAD)),
    "gpt_neox": Family(
        _GPT_NEOX_EMBEDDINGS + _GPT_NEOX_ATTENTION + _biased(_GPT_NEOX_BIASED),
        "gpt_neox",
        if_set={"attention_bias": _biases(_GPT_NEOX_ATTENTION)},
        renamed={"embed_out.": "lm_head."},
    ),
    "gpt2": Family(
        _GPT2,
        "transformer",
        keys={"intermediate_size": "n_inner"},
        ffn_factor=4,
    ),
    "mixtral": Family(
        _EMBEDDINGS + _PROJECTIONS + _NORMS + _ROUTER,
        renamed={".block_sparse_moe.": ".mlp."},
    ),
    "qwen3_moe": Family(_EMBEDDINGS + _PROJECTIONS + _NORMS + _HEAD_NORMS, if_set=_BIASES),
    "bert": Family(_BERT_TENSORS, "bert", "", _biased(_POOLED_CLASSIFIER), renamed=_OLD_NORMS),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": Family(
        _BERT_EMBEDDINGS + _RELATIVE_POSITIONS + _biased(_MPNET),
        "mpnet",
        "",
        _TWO_LAYERS,
        renamed=_OLD_NORMS,
    ),
    "distilbert": Family(
        _BERT_EMBEDDINGS + _biased(_DISTILBERT),
        "distilbert",
        "",
        _biased(_DISTILBERT_CLASSIFIER),
        keys={"intermediate_size": "hidden_dim"},
        renamed=_OLD_NORMS,
    ),
}
