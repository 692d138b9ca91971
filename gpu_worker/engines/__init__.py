"""Engines: sequences come in, tokens or vectors come out. Only engines that need torch import it.

engine       the protocol: `Engine`, `Sequence`, `Output`, `FreeCapacity`
factory      builds an engine by name; mock needs no torch
engine_holder, driver, engine_watchdog  keep one engine, run it in its thread, notice its failure
sequence_limits, seeds, detokenizer  checks before a batch, default seeds, tokens to text
token_bytes  the bytes that each token of a tokeniser stands for
demo_models, gemma_tokenizer  convert the demo models from their packages
paged/       language models with continuous batching over a paged KV cache
unary/       embedding and classification in dynamic batches
remote/      models behind another server's API
mock, simulated_prefix_cache  deterministic text at a set pace, to measure the rest
device_memory, device_transfer, precision, openmp_runtime, engine_stats, step_timer  shared by
             engines
"""
