"""Tells whether a tokeniser marks which text of a pair a token belongs to, as in transformers.

tokenizer.json always has such types; transformers' classes give them to a model, or leave them out.
"""

from registry.artifact_verification import ReadJson, read_object
from registry.tokenizer.bert_normalizer import tokenizer_class

_TYPES = "token_type_ids"
CLASSES = frozenset({
    "BertTokenizer", "CanineTokenizer", "DPRQuestionEncoderTokenizer", "DebertaTokenizer",
    "DebertaV2Tokenizer", "ElectraTokenizer", "FNetTokenizer", "LayoutLMv2Tokenizer",
    "LxmertTokenizer", "MarkupLMTokenizer", "MobileBertTokenizer", "TapasTokenizer",
})  # fmt: skip


def marks_second_text(read: ReadJson) -> bool:
    """Return whether a directory's tokeniser gives a model the types of tokens.

    `model_input_names` in tokenizer_config.json says so, else the tokeniser's class.
    """
    names = read_object(read, "tokenizer_config.json").get("model_input_names")
    return _TYPES in names if isinstance(names, list) else tokenizer_class(read) in CLASSES
