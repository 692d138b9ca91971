"""Makes models for measurements, with real shapes and random weights."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

VOCABULARY = 10_240


def small_llama(directory: Path) -> Path:
    """Save a Llama of 28 million parameters in float32 to `directory`, and return that.

    The model is made in a process of its own: like a worker, the measuring process must not have
    imported torch when its engine chooses the OpenMP runtime.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(_make_llama, directory).result()
    return directory


def _make_llama(directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
