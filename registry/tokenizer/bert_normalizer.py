"""Sets the normaliser of BERT's tokenisers, which transformers makes anew from their settings.

Its classes for BERT and its kin take the vocabulary of tokenizer.json, and not the normaliser:
case, accents and Chinese characters are treated as tokenizer_config.json says.
"""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer

from registry.artifact_verification import ArtifactRefused, ReadJson, read_object
from registry.checkpoints.model_types import read_types

_FILE = "tokenizer_config.json"
CLASSES = frozenset({
    "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "FunnelTokenizer",
    "LayoutLMTokenizer", "LayoutLMv2Tokenizer", "LxmertTokenizer", "MPNetTokenizer",
    "MobileBertTokenizer", "SplinterTokenizer", "SqueezeBertTokenizer",
})  # fmt: skip
# Classes that take tokenizer.json as it is, whatever tokenizer_config.json says
_GENERIC = frozenset({"TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast"})


def set_bert_normalizer(library: Tokenizer, read: ReadJson) -> None:
    """Give a tokeniser the normaliser that transformers would, if its class is one of `CLASSES`.

    Raises `ArtifactRefused` for settings that transformers would not take.
    """
    if tokenizer_class(read) not in CLASSES or not isinstance(library.model, WordPiece):
        return
    settings = read_object(read, _FILE)
    strip_accents = settings.get("strip_accents")
    library.normalizer = BertNormalizer(
        clean_text=True,
        handle_chinese_chars=_flag(settings, "tokenize_chinese_chars"),
        strip_accents=None if strip_accents is None else _flag(settings, "strip_accents"),
        lowercase=_flag(settings, "do_lower_case"),
    )


def tokenizer_class(read: ReadJson) -> str:
    """Return the name of transformers' class for a directory's tokeniser; empty for none.

    It is the class that the model type demands if that is a generic one, else the one that the
    files name, else that of the type.
    """
    config = read_object(read, "config.json")
    model_type = config.get("model_type")
    kind = read_types().get(model_type) if isinstance(model_type, str) else None
    own = kind.tokenizer if kind else ""
    named = read_object(read, _FILE).get("tokenizer_class") or config.get("tokenizer_class")
    found = named if isinstance(named, str) and own not in _GENERIC else own
    return found.removesuffix("Fast")


def _flag(settings: dict[str, Any], key: str) -> bool:
    value = settings.get(key, True)
    if not isinstance(value, bool):
        raise ArtifactRefused(_FILE, f"{key} is {value!r}: write true or false, or leave it out")
    return value
