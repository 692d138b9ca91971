"""A Gemma's tokeniser comes out of a GGUF file as it went in."""

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer

from gpu_worker.engines.gemma_tokenizer import read_tokenizer

CONTROL, PLAIN, DEFINED = TokenType.CONTROL, TokenType.NORMAL, TokenType.USER_DEFINED
TOKENS = {
    "<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": CONTROL, "<mask>": CONTROL,
    "<turn>": CONTROL, "<tag>": DEFINED, "  ": DEFINED, "bc": PLAIN, "ab": PLAIN, "abc": PLAIN,
    "a": PLAIN, "b": PLAIN, "c": PLAIN, "▁": PLAIN, "<start_of_image>": DEFINED,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gemma")
    writer = GGUFWriter(path / "gemma.gguf", "gemma3")
    writer.add_token_list(list(TOKENS))
    writer.add_token_types(list(TOKENS.values()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read_tokenizer(path / "gemma.gguf").save_pretrained(path)
    return Tokenizer.from_file(str(path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("c", ["<bos>", "c"]),
        ("ab", ["<bos>", "ab"]),
        ("abcb", ["<bos>", "abc", "b"]),
        ("bcab", ["<bos>", "bc", "ab"]),
        ("a  b", ["<bos>", "a", "▁▁", "b"]),
        ("a<turn>b<tag>c", ["<bos>", "a", "<turn>", "b", "<tag>", "c"]),
    ],
)
def test_a_text_is_cut_as_the_model_learned_it(
    saved: Tokenizer, text: str, tokens: list[str]
) -> None:
    """By merges in the file's order; other ids, or no `<bos>`, make the model babble."""
    assert saved.encode(text).tokens == tokens


def test_special_tokens_are_no_text(saved: Tokenizer) -> None:
    """The file tells them from tokens that its author defined, except for the marks of images."""
    assert saved.decode(saved.encode("a<turn>  b<tag><start_of_image>").ids) == "a  b<tag>"
