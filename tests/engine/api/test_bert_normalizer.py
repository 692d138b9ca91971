"""Case, accents and Chinese characters are as transformers' tokeniser classes treat them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from transformers import AutoTokenizer

from registry.artifact_verification import ArtifactRefused
from registry.tokenizer.added_tokens import load_tokenizer

WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "paris",
    "Paris",
    "é",
    "e",
    "中",
    "文",
    "中文",
)
TEXT = "Paris paris é É 中文"


def write(directory: Path, lowers: bool, settings: Any, model_type: str = "bert") -> Path:
    made = Tokenizer(WordPiece({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    if settings is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("lowers", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        None,
        {},
        {"do_lower_case": False},
        {"do_lower_case": True},
        {"strip_accents": False},
        {"strip_accents": True, "do_lower_case": False},
        {"strip_accents": None, "tokenize_chinese_chars": False},
        {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True},
        {"tokenizer_class": "DistilBertTokenizerFast", "do_lower_case": False},
        {"tokenizer_class": "MPNetTokenizer", "do_lower_case": False},
        {"tokenizer_class": "Unknown", "do_lower_case": True},
    ],
)
@pytest.mark.parametrize("model_type", ["bert", "mpnet", "electra", "modernbert", "nomic_bert"])
def test_tokens_are_those_of_transformers(
    tmp_path: Path, lowers: bool, settings: Any, model_type: str
) -> None:
    """Otherwise vectors are of other words, without an error."""
    directory = write(tmp_path, lowers, settings, model_type)
    wanted = AutoTokenizer.from_pretrained(directory).encode(TEXT, add_special_tokens=False)
    found = load_tokenizer(directory, len(WORDS)).encode(TEXT, add_special_tokens=False)
    assert found.ids == wanted


@pytest.mark.parametrize("key", ["do_lower_case", "tokenize_chinese_chars", "strip_accents"])
def test_a_setting_that_is_no_flag_is_refused(tmp_path: Path, key: str) -> None:
    """transformers takes none, either."""
    directory = write(tmp_path, True, {key: "yes"})
    with pytest.raises(ArtifactRefused, match=rf"tokenizer_config\.json: {key} is 'yes'"):
        load_tokenizer(directory, len(WORDS))
