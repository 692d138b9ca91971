"""Tokens that tokenizer.json lacks: known as in transformers, wherever a directory has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from api.tokenizer import load_tokenizer
from registry.artifact_verification import ArtifactRefused, combine_digests, hash_files, json_reader
from registry.model_inspection import model_from
from registry.models import Model, mock_model
from registry.tokenizer.added_tokens import load_tokenizer as load_library
from registry.tokenizer.added_tokens import read_end_id
from tests.support.versions import make_version

VOCABULARY = 300
BYTES = 256
TEXT = "a<s>b</s>c <|im_start|>user\nhi<|im_end|><tool_call>x</tool_call>  <pad> <mask>"
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast"}
END, CALL = "<|im_end|>", "<tool_call>"


def token(content: str, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    given = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": not special}
    return {"content": content, "special": special, **given, **flags}


DIRECTORIES: dict[str, dict[str, Any]] = {
    "nothing added": {},
    "a decoder": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "257": token("<|im_start|>"),
                "258": token(END, rstrip=True),
                "259": token(CALL, special=False),
                "256": token("<s>"),
            }
        }
    },
    "names": {"tokenizer_config": {"pad_token": "<pad>", "eos_token": END, "bos_token": "<s>"}},
    "names with flags": {
        "tokenizer_config": {
            "eos_token": {"__type": "AddedToken", **token(END, rstrip=True)},
            "mask_token": {"__type": "AddedToken", **token("<mask>", lstrip=True)},
        }
    },
    "a name of a plain byte": {"tokenizer_config": {"pad_token": "h", "eos_token": "i"}},
    "a name of the model's own": {"tokenizer_config": {"call_token": CALL, "eos_token": END}},
    "more special tokens": {
        "tokenizer_config": {"eos_token": END, "additional_special_tokens": [CALL, "<|im_start|>"]}
    },
    "more special tokens by their newer name": {
        "tokenizer_config": {"eos_token": END, "extra_special_tokens": [CALL, "<|im_start|>"]}
    },
    "more special tokens with names of their own": {
        "tokenizer_config": {
            "eos_token": END,
            "pad_token": "<pad>",
            "extra_special_tokens": {"call_token": CALL, "start_token": "<|im_start|>"},
        }
    },
    "older files": {
        "added_tokens": {"<|im_start|>": 257, END: 258, CALL: 256},
        "special_tokens_map": {"eos_token": token(END), "bos_token": "<s>"},
    },
    "older files and a decoder": {
        "tokenizer_config": {"added_tokens_decoder": {"256": token(END)}, "eos_token": END},
        "added_tokens": {CALL: 256},
    },
}


def write(directory: Path, files: dict[str, Any], *known: AddedToken | str) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({char: number for number, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*known])
    made.save(str(directory / "tokenizer.json"))
    files = {**files, "tokenizer_config": {**CONFIG, **files.get("tokenizer_config", {})}}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def model_in(directory: Path, vocab_size: int = VOCABULARY) -> Model:
    files = hash_files(directory)
    version = make_version(
        directory=str(directory),
        files=files,
        digest=combine_digests(files),
        vocab_size=vocab_size,
    )
    fields = {"engine": "transformers", "versions": {"1": version}}
    return Model.model_validate({**mock_model().model_dump(), **fields})


@pytest.mark.parametrize("name", DIRECTORIES)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """In the prompts that the gateway makes, and in the texts that a worker makes of tokens."""
    library = load_library(write(tmp_path, DIRECTORIES[name]), VOCABULARY)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    model = model_in(tmp_path)
    expected = theirs.encode(TEXT, add_special_tokens=False)
    assert load_tokenizer(model, model.default).encode([TEXT], special=False) == [expected]
    for skips in (False, True):
        found = library.decode(expected, skip_special_tokens=skips)
        assert found == theirs.decode(expected, skip_special_tokens=skips)
    assert read_end_id(library, json_reader(tmp_path)) == theirs.eos_token_id


def test_a_token_without_an_embedding_stays_text(tmp_path: Path) -> None:
    """Its id would fail the request of whoever writes it."""
    write(tmp_path, {"tokenizer_config": {"pad_token": "[PAD]", "eos_token": END}})
    model = model_in(tmp_path, BYTES + 1)
    made = load_tokenizer(model, model.default)
    (found,) = made.encode([END + "[PAD]"], special=False)
    assert found[0] == BYTES
    assert len(found) == 1 + len("[PAD]")


def test_an_added_token_in_a_message_stays_text(tmp_path: Path) -> None:
    """Whoever writes it would end the turn, wherever the token is declared."""
    model = model_in(write(tmp_path, {"tokenizer_config": {"eos_token": END}}))
    mark, cut = load_tokenizer(model, model.default).control_tokens.cut([f"x{END}"])
    assert mark
    assert END not in cut[0]


def write_llama(directory: Path, files: dict[str, Any], *known: AddedToken | str) -> Path:
    """A model that lacks nothing, with these files of its tokeniser."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return write(directory, files, *known)


@pytest.mark.parametrize("known", [[], ["<s>"]])
def test_an_id_that_cannot_be_kept_is_refused(tmp_path: Path, known: list[str]) -> None:
    """The library would number the token otherwise, and the model read another one."""
    decoder = {"added_tokens_decoder": {"270": token(END)}}
    write_llama(tmp_path, {"tokenizer_config": decoder}, *known)
    with pytest.raises(ArtifactRefused, match=r"'<\|im_end\|>' the id 270, tokenizer.json 25"):
        model_from(tmp_path, "m")


def as_pickle(path: Path) -> None:
    path.write_text("no tokeniser")


def as_other_json(path: Path) -> None:
    path.write_text("[1]")


@pytest.mark.parametrize("spoil", [as_pickle, as_other_json])
def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """At registration, not by the first request."""
    write_llama(tmp_path, {})
    spoil(tmp_path / "tokenizer.json")
    with pytest.raises(ArtifactRefused, match=r"tokenizer\.json"):
        model_from(tmp_path, "m")


def test_byte_order_marks_do_no_harm_where_files_are_read_here(tmp_path: Path) -> None:
    """Editors of Windows write them."""
    write_llama(tmp_path, {"tokenizer_config": {"eos_token": END, "chat_template": "T"}})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("\ufeff" + (tmp_path / name).read_text())
    model = model_from(tmp_path, "m")
    assert model.default.chat_template == "T"
    assert load_tokenizer(model, model.default).encode([END], special=False) == [[BYTES]]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_byte_order_mark_that_transformers_would_not_read_is_refused(
    tmp_path: Path, name: str
) -> None:
    """With the command that removes it."""
    write_llama(tmp_path, {"generation_config": {}})
    (tmp_path / name).write_text("\ufeff" + (tmp_path / name).read_text())
    with pytest.raises(ArtifactRefused, match=rf"{name}: begins with a byte order mark.*sed -i"):
        model_from(tmp_path, "m")


def test_special_tokens_that_are_split_in_texts_are_refused(tmp_path: Path) -> None:
    """A template's own would be split, too."""
    write(tmp_path, {"tokenizer_config": {"split_special_tokens": True}})
    with pytest.raises(
        ArtifactRefused, match=r"tokenizer_config\.json: split_special_tokens is set"
    ):
        load_library(tmp_path, VOCABULARY)
