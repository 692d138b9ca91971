"""Tokenisers of the registered models, loaded once and run off the event loop.

Measured with the library `tokenizers` 0.23 on one core: Gemma's takes 0.06 ms for 400 characters,
0.7 ms for 4,000 and 50 ms for 200,000; a hop to a thread and back takes 0.08 ms. Hence texts of up
to `INLINE_CHARACTERS` are encoded on the event loop. Of the library's methods `encode` holds
Python's lock and `encode_batch_fast` releases it, so only the latter is used. Loading holds the
lock throughout (Gemma's 262,144 tokens: 0.9 s): call `warm` before requests come.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import tokenizers
from tokenizers import normalizers

from api import chat_template
from api.control_tokens import ControlTokens
from registry.artifact_verification import ArtifactChanged, ReadJson, read_verified
from registry.models import Model, Version
from registry.sentence_encoder import TextSettings, read_text_settings
from registry.tokenizer.added_tokens import TOKENIZER, build_tokenizer, read_special_tokens
from streams.errors import TokenOutOfRange, UnsupportedValue

T = TypeVar("T")
INLINE_CHARACTERS = 400
LONG_CHARACTERS = 32_768  # longer texts have a thread of their own, so short ones need not wait
MAX_LOADED = 8
AS_IT_IS = TextSettings()  # a text goes to the tokeniser unchanged


class EncodedPair(NamedTuple):
    """Token ids of a query and a text as one sequence, joined as the model takes pairs.

    `split` is the index in `tokens` where the second text begins. For a model that does not mark
    which of the two texts a token belongs to, `split` is the length of `tokens`.
    """

    tokens: list[int]
    split: int


class Tokenizer(Protocol):
    """Turns texts into the token ids that a model takes. Safe to use from several threads."""

    special_tokens: Mapping[str, str]  # by name: `bos_token`, `eos_token`, ...
    control_tokens: ControlTokens  # texts that `encode` turns into tokens with a meaning

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the token ids of each text, in the order of `texts`.

        If `special` is True, the special tokens that the model expects around a text (such as BOS)
        are added.
        """

    def encode_pairs(self, query: str, texts: Sequence[str]) -> list[EncodedPair]:
        """Return one sequence for each text, which holds the query and then that text.

        The two are joined with the special tokens of a pair, as the model was trained on pairs.
        """


class ByteTokenizer:
    """Turns a text into its UTF-8 bytes, one token id (0..255) for each byte.

    Used for the mock engine and for models that were registered without a tokeniser.
    """

    special_tokens: Mapping[str, str] = {}
    control_tokens = ControlTokens(())

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the UTF-8 bytes of each text as token ids; `special` changes nothing."""
        return [list(text.encode()) for text in texts]

    def encode_pairs(self, query: str, texts: Sequence[str]) -> list[EncodedPair]:
        """Return the bytes of the query and each text, with nothing between the two."""
        return [EncodedPair(list((query + text).encode()), len(query.encode())) for text in texts]


class FileTokenizer:
    """The tokeniser in `content`, the bytes of a model version's tokenizer.json.

    Truncation and padding that the file asks for are switched off, so every text is encoded whole.
    The `settings` of a sentence encoder or reranker say what is done to texts. `read` reads the
    other files, which may have tokens that `content` lacks, as far as they are below `vocab_size`.
    Raises `ArtifactRefused` if `content` is no tokeniser.
    """

    def __init__(
        self,
        content: bytes,
        special_tokens: Mapping[str, str],
        settings: TextSettings = AS_IT_IS,
        read: ReadJson = lambda path: None,
        vocab_size: int = 0,
    ) -> None:
        self.special_tokens = special_tokens
        self._settings = settings
        self._library = build_tokenizer(content, read, vocab_size)
        if settings.lower_case:
            _lower_texts(self._library)
        added = self._library.get_added_tokens_decoder().values()
        self.control_tokens = ControlTokens(each.content for each in added if each.special)
        self._library.no_truncation()
        self._library.no_padding()

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the token ids of each text, in the order of `texts`.

        If `special` is True, the special tokens of the model are added around each text. Python's
        lock is released, so other threads run on meanwhile.
        """
        prompted = [self._settings.prompt + text for text in texts]
        encoded = self._library.encode_batch_fast(prompted, add_special_tokens=special)
        return [encoding.ids for encoding in encoded]

    def encode_pairs(self, query: str, texts: Sequence[str]) -> list[EncodedPair]:
        """Return one sequence for each text: the query and the text, joined as the file says."""
        pairs = [(self._settings.prompt + query, text) for text in texts]
        return [self._to_encoded_pair(each) for each in self._library.encode_batch_fast(pairs)]

    def _to_encoded_pair(self, encoding: tokenizers.Encoding) -> EncodedPair:
        """Find the split by type ids: 1 from the second text on, or 0 throughout if all are alike.

        The split is the end of the sequence then, and where the model is given no types.
        """
        types = encoding.type_ids
        is_marked = self._settings.marks_second_text and 1 in types
        return EncodedPair(encoding.ids, types.index(1) if is_marked else len(types))


def _lower_texts(library: tokenizers.Tokenizer) -> None:
    """Lower texts before all else that the tokeniser does to them."""
    own = [library.normalizer] if library.normalizer else []
    library.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])


class TokenizerCache:
    """Loads and runs the tokenisers of model versions without blocking the event loop for long.

    The `capacity` last used ones are kept; another one is loaded again when it is asked for. Up to
    `INLINE_CHARACTERS` characters are encoded on the event loop, more in a thread. The owner must
    call `close` at the end.
    """

    def __init__(self, capacity: int = MAX_LOADED) -> None:
        self._capacity = capacity
        self._loaded: OrderedDict[str, asyncio.Future[Tokenizer]] = OrderedDict()
        self._short_executor = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._long_executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")

    def close(self) -> None:
        """Stop the threads and return at once. Idempotent.

        Loading or encoding that has begun goes on to its end in its thread; what has not begun is
        cancelled.
        """
        self._short_executor.shutdown(wait=False, cancel_futures=True)
        self._long_executor.shutdown(wait=False, cancel_futures=True)

    async def warm(self, model: Model, version: Version) -> None:
        """Load a version's tokeniser into the cache and return once it is there.

        The first request for the version then need not wait for it. Raises `ArtifactChanged` if a
        file is missing on this machine or differs from the registered one, and `ArtifactRefused` if
        it is no tokeniser; the next call tries again.
        """
        await self._get(model, version)

    async def encode_texts(
        self, model: Model, version: Version, texts: Sequence[str]
    ) -> list[list[int]]:
        """Return the token ids of each text, with the special tokens that the model expects.

        The version's tokeniser is loaded first if it is not in the cache. Raises `ArtifactChanged`
        if its files are missing on this machine or differ from the registered ones.
        """
        tokenizer = await self._get(model, version)
        size = sum(map(len, texts))
        return await self._run(size, lambda: tokenizer.encode(texts, special=True))

    async def encode_pairs(
        self, model: Model, version: Version, query: str, texts: Sequence[str]
    ) -> list[EncodedPair]:
        """Return one sequence of token ids for each text: the query, then that text.

        The version's tokeniser is loaded first if it is not in the cache. Raises `ArtifactChanged`
        if its files are missing on this machine or differ from the registered ones.
        """
        tokenizer = await self._get(model, version)
        size = sum(map(len, texts)) + len(texts) * len(query)
        return await self._run(size, lambda: tokenizer.encode_pairs(query, texts))

    async def encode_chat(
        self,
        model: Model,
        version: Version,
        messages: Sequence[chat_template.Message],
        tools: Sequence[chat_template.Tool] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a chat as a prompt that ends where the answer is to begin.

        The version's chat template makes the prompt and writes the special tokens itself, as
        Hugging Face's templates do. A version without one gets a plain dialogue, to which the
        tokeniser adds the special tokens. `options` are more variables for the template. The text
        of a special token in a message, tool or option is encoded as plain text. Raises
        `BadRequest` if the template refuses the messages, and `ArtifactChanged` if the tokeniser's
        files are missing on this machine or differ from the registered ones.
        """
        tokenizer = await self._get(model, version)

        def encode() -> list[int]:
            special = tokenizer.special_tokens
            mark, safe = tokenizer.control_tokens.cut([messages, tools, options])
            safe_messages, safe_tools, safe_options = safe
            text = chat_template.render(
                version.chat_template, safe_messages, special, safe_tools, safe_options
            )
            first, *rest = text.split(mark) if mark else [text]
            (tokens,) = tokenizer.encode([first], special=version.chat_template is None)
            return [*tokens, *chain.from_iterable(tokenizer.encode(rest, special=False))]

        return await self._run(_count_characters(messages, tools), encode)

    async def _run(self, characters: int, function: Callable[[], T]) -> T:
        if characters <= INLINE_CHARACTERS:
            return function()
        executor = self._short_executor if characters <= LONG_CHARACTERS else self._long_executor
        return await asyncio.get_running_loop().run_in_executor(executor, function)

    async def _get(self, model: Model, version: Version) -> Tokenizer:
        key = f"{model.engine} {version.digest} {version.directory}"
        loading = self._loaded.get(key)
        if loading is None:
            loading = self._load(key, model, version)
        self._loaded.move_to_end(key)
        return await asyncio.shield(loading)  # other requests may wait for the same load

    def _load(self, key: str, model: Model, version: Version) -> "asyncio.Future[Tokenizer]":
        loop = asyncio.get_running_loop()
        loading = loop.run_in_executor(self._long_executor, load_tokenizer, model, version)
        loading.add_done_callback(lambda done: self._drop_failed_load(key, done))
        self._loaded[key] = loading
        if len(self._loaded) > self._capacity:
            self._loaded.popitem(last=False)
        return loading

    def _drop_failed_load(self, key: str, done: "asyncio.Future[Tokenizer]") -> None:
        """Forget a failed load: requests that waited for it fail, the next one tries again."""
        if (done.cancelled() or done.exception()) and self._loaded.get(key) is done:
            del self._loaded[key]


def _count_characters(
    messages: Sequence[chat_template.Message], tools: Sequence[chat_template.Tool] | None
) -> int:
    """The approximate number of characters of a chat, to choose a thread by."""
    size = sum(len(chat_template.join_parts(message["content"])) for message in messages)
    structured = [tools, *(m["tool_calls"] for m in messages if "tool_calls" in m)]
    return size + len(str(structured)) if any(structured) else size


def check_token_ids(model: Model, version: Version, tokens: Sequence[int], field: str) -> None:
    """Raise `TokenOutOfRange` if one of `tokens` is not an id of the version's vocabulary.

    The error names the first such id and `field`, the part of the request that held the ids. Raises
    `UnsupportedValue` for a version that was registered without a tokeniser, since its vocabulary
    is not known here; only texts can be sent to such a version.
    """
    if not version.has_tokenizer:
        raise UnsupportedValue(
            f"the model {model.name!r} takes texts alone: it is registered without a tokenizer",
            field,
        )
    if tokens and not 0 <= min(tokens) <= max(tokens) < version.vocab_size:
        culprit = next(token for token in tokens if not 0 <= token < version.vocab_size)
        raise TokenOutOfRange(culprit, version.vocab_size, field)


def load_tokenizer(model: Model, version: Version) -> Tokenizer:
    """Read a version's tokeniser from its files, check them against the registry, and return it.

    Slow (0.9 s for Gemma's), so call it in a thread. The mock engine, and a model registered
    without a tokeniser, get a `ByteTokenizer`, for which nothing is read. Raises `ArtifactChanged`
    if a file is missing on this machine or differs from the registered one, and `ArtifactRefused`
    if it is no tokeniser.
    """
    if model.engine == "mock" or not version.has_tokenizer:
        return ByteTokenizer()
    read = cache(partial(_read_json, version))
    is_unary = model.engine in ("embed", "classify")
    settings = read_text_settings(read, model.engine) if is_unary else AS_IT_IS
    content = _read_file(version, TOKENIZER)
    return FileTokenizer(content, read_special_tokens(read), settings, read, version.vocab_size)


def _read_json(version: Version, path: str) -> Any:
    """Return the content of a version's JSON file; None if it has no such file."""
    return json.loads(_read_file(version, path)) if path in version.files else None


def _read_file(version: Version, path: str) -> bytes:
    if version.directory is None or path not in version.files:
        raise ArtifactChanged(path, f"is not among the files of version {version.id!r}")
    return read_verified(Path(version.directory), path, version.files[path])
