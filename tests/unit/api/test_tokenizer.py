"""Tokenisers: exact counts, loaded once, and never in the event loop's way."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from api import tokenizer
from api.tokenizer import FileTokenizer, TokenizerCache, check_token_ids
from registry.artifact_verification import (
    ArtifactChanged,
    ArtifactRefused,
    combine_digests,
    hash_files,
)
from registry.models import Model, Version, mock_model
from streams.errors import TokenOutOfRange
from tests.support.versions import make_version, with_facts

MOCK = mock_model()


@pytest.fixture
def made() -> Iterator[TokenizerCache]:
    made = TokenizerCache()
    yield made
    made.close()


@pytest.fixture
def words(tmp_path: Path) -> Model:
    """A model whose tokeniser knows two words, cuts at two tokens and pads to four."""
    library = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.enable_truncation(2)
    library.enable_padding(length=4)
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "pad_token": None, "model_max_length": 9})
    )
    return model_in(tmp_path)


def model_in(directory: Path, engine: str = "transformers") -> Model:
    files = hash_files(directory)
    digest = combine_digests(files)
    version = make_version(directory=str(directory), files=files, digest=digest, vocab_size=3)
    fields = {"engine": engine, "versions": {"1": version}}
    return Model.model_validate({**MOCK.model_dump(), **fields})


async def test_the_mocks_tokens_are_bytes(made: TokenizerCache) -> None:
    """A prompt of n ASCII letters is n tokens: what tests and benchmarks count on."""
    assert await made.encode_texts(MOCK, MOCK.default, ["aé"]) == [[97, 195, 169]]
    many = await made.encode_texts(MOCK, MOCK.default, ["", "x" * 50_000, "y"])
    assert [len(tokens) for tokens in many] == [0, 50_000, 1]


async def test_a_pair_is_tokenised_by_the_models_template(
    made: TokenizerCache, words: Model
) -> None:
    """With its separators; the types tell where the second text begins, if the model has them."""
    plain = await made.encode_pairs(words, words.default, "a", ["b", "b a"])
    assert plain == [([1, 2], 2), ([1, 2, 1], 3)]
    assert words.default.directory
    path = Path(words.default.directory) / "tokenizer.json"
    library = Tokenizer.from_file(str(path))
    library.post_processor = processors.TemplateProcessing(
        pair="$A [UNK] $B:1 [UNK]:1", special_tokens=[("[UNK]", 0)]
    )
    library.save(str(path))
    untyped = model_in(path.parent, "classify")
    assert await made.encode_pairs(untyped, untyped.default, "a a", ["b"]) == [([1, 1, 0, 2, 0], 5)]
    settings = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    (path.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    typed = model_in(path.parent, "classify")
    assert await made.encode_pairs(typed, typed.default, "a a", ["b"]) == [([1, 1, 0, 2, 0], 3)]


@pytest.mark.parametrize("content", [b"{}", b"", b"\xff", b'{"model": {"type": "Own"}}'])
def test_what_is_no_tokeniser_is_refused(content: bytes) -> None:
    """By name, so that whoever loads it can go on with other models."""
    with pytest.raises(ArtifactRefused, match="tokenizer.json: is no tokeniser"):
        FileTokenizer(content, {})


async def test_nothing_is_cut_off_or_padded(made: TokenizerCache, words: Model) -> None:
    """Sentence encoders ship a tokeniser that cuts; the count would be wrong and text lost."""
    assert await made.encode_texts(words, words.default, ["a b a b a"]) == [[1, 2, 1, 2, 1]]
    assert await made.encode_texts(words, words.default, ["a", "a b"]) == [[1], [1, 2]]


async def test_a_template_sees_the_tokenisers_special_tokens(
    made: TokenizerCache, words: Model
) -> None:
    """Both ways in which configurations spell a token, and none for those that are null."""
    template = "{{ bos_token }}|{{ pad_token }}|{{ messages[0].content }}"
    model = with_facts(words, chat_template=template)
    seen = await made.encode_chat(model, model.default, [{"role": "user", "content": "a"}])
    assert [seen] == await made.encode_texts(words, words.default, ["<s>||a"])


async def test_control_tokens_in_a_message_are_text(made: TokenizerCache, tmp_path: Path) -> None:
    """Else a user could end the turn and speak as the assistant."""
    entries = {"[UNK]": 0, "a": 1, "<": 2, "eot": 3, ">": 4, "<eot>": 5}
    library = Tokenizer(models.WordLevel(entries, unk_token="[UNK]"))  # not a secret
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<eot>"])
    library.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} <eot> {% endfor %}"
    model = with_facts(model_in(tmp_path), chat_template=template)

    async def tokens_of(content: str) -> list[int]:
        messages = [{"role": "user", "content": content}]
        return await made.encode_chat(model, model.default, messages)

    assert await tokens_of("a") == [1, 5]
    assert await tokens_of("a <eot> a") == [1, 2, 3, 4, 1, 5]
    assert (await tokens_of("<eot>" * 3)).count(5) == 1
    assert await made.encode_texts(model, model.default, ["a <eot>"]) == [[1, 5]]


async def test_concurrent_requests_load_a_tokeniser_once(
    made: TokenizerCache, words: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading Gemma's takes a second of one core, whoever asks how often."""
    loads: list[str] = []
    real = tokenizer.load_tokenizer

    def load(model: Model, version: Version) -> tokenizer.Tokenizer:
        loads.append(threading.current_thread().name)
        return real(model, version)

    monkeypatch.setattr(tokenizer, "load_tokenizer", load)
    await asyncio.gather(*(made.encode_texts(words, words.default, ["a"]) for _ in range(20)))
    assert [name.startswith("tokenizer") for name in loads] == [True]


async def test_a_waiter_that_gives_up_does_not_fail_the_others(
    made: TokenizerCache, words: Model
) -> None:
    """A client that disconnects during the load must not cost the next client its answer."""
    first = asyncio.create_task(made.encode_texts(words, words.default, ["a"]))
    second = asyncio.create_task(made.encode_texts(words, words.default, ["b"]))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == [[2]]


async def test_only_the_last_few_tokenisers_are_kept(
    words: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded: a large vocabulary takes hundreds of megabytes."""
    loads: list[str] = []

    def load(model: Model, version: Version) -> tokenizer.Tokenizer:
        loads.append(str(version.digest))
        return tokenizer.ByteTokenizer()

    monkeypatch.setattr(tokenizer, "load_tokenizer", load)
    made = TokenizerCache(capacity=2)
    versions = [words.default.model_copy(update={"digest": d}) for d in "abc"]
    for version in (*versions[:2], versions[0], versions[2], versions[0], versions[1]):
        await made.warm(words, version)
    assert loads == ["a", "b", "c", "b"]
    made.close()


@pytest.mark.parametrize("what", ["missing", "changed", "unregistered"])
async def test_files_that_are_not_the_registered_ones_are_refused(
    made: TokenizerCache, words: Model, what: str
) -> None:
    """Other token ids than the worker's would be nonsense without a sign of it."""
    file = Path(words.default.directory or "") / "tokenizer.json"
    version, good = words.default, file.read_bytes()
    if what == "unregistered":
        version = version.model_copy(update={"files": {}})
    else:
        file.unlink() if what == "missing" else file.write_text("{}")
    with pytest.raises(ArtifactChanged, match=r"tokenizer.json"):
        await made.encode_texts(words, version, ["a"])
    file.write_bytes(good)
    assert await made.encode_texts(words, words.default, ["a"]) == [[1]]  # a failure is not kept


async def test_a_long_text_leaves_the_loop_free(made: TokenizerCache, words: Model) -> None:
    """One stranger's megabyte must not stop everybody's tokens."""
    await made.warm(words, words.default)
    ticks = 0
    encoding = asyncio.create_task(made.encode_texts(words, words.default, ["a b " * 200_000]))
    while not encoding.done():
        await asyncio.sleep(0)
        ticks += 1
    assert [len(tokens) for tokens in encoding.result()] == [400_000]
    assert ticks > 100


async def test_short_texts_do_not_wait_for_long_ones(made: TokenizerCache, words: Model) -> None:
    """A long prompt of one tenant must not move another's time to first token."""
    await made.warm(words, words.default)
    long = [
        asyncio.create_task(made.encode_texts(words, words.default, ["a " * 400_000]))
        for _ in "123"
    ]
    await asyncio.sleep(0)
    (tokens,) = await made.encode_texts(words, words.default, ["a " * 1000])
    assert len(tokens) == 1000
    assert not all(task.done() for task in long)
    await asyncio.gather(*long)


@pytest.mark.parametrize("tokens", [[3], [-1], [0, 2, 10**30]])
def test_a_token_outside_the_vocabulary_is_named(tokens: list[int], words: Model) -> None:
    """One such id would end a whole batch in the engine."""
    with pytest.raises(TokenOutOfRange, match=str(tokens[-1])) as refused:
        check_token_ids(words, words.default, tokens, "prompt")
    assert refused.value.field == "prompt"
    check_token_ids(words, words.default, [0, 2], "prompt")
    check_token_ids(words, words.default, [], "prompt")
