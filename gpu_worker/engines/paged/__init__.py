"""Continuous batching with a paged KV cache over any Hugging Face causal language model.

scheduler  who runs in the next step, and how far      (pure)
run        a sequence on its way                       (pure)
cache      the KV of runs, by the windows of layers    (pure)
blocks     KV blocks, shared by equal prefixes         (pure)
plan       a step as tensors
attention  the attention function over the blocks
adapters   which LoRA adapters are in memory, and who waits for one
lora       their weights, added in the forward pass
sampler    logits to tokens
model      the weights; what is refused, and why
computation  a step's forward pass and samples, without those who make it fail
engine     one step: schedule, compute, report
loading    an engine from a directory, fitted to the memory
"""
