"""Attention on a GPU: a step's queries and the KV blocks come in, the rows' output goes out.

What is installed is found out at load; nothing of it is required.

selection                first, at load: the best kernels for a device, its torch and a type
flash_attention          torch's FlashAttention: over blocks (version 3) or over gathered KV
triton_decode_attention  decode attention in Triton, over blocks, long contexts in splits
"""
