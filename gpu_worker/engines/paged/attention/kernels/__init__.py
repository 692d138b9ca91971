"""Attention on a GPU. What is there is found out at load; nothing of it is required.

selection     the best that a device, its torch and a type have
split_decode  decode attention in Triton, over blocks where they are
flash         torch's FlashAttention: over blocks where they are, or over gathered KV
packed        runs' chunks end to end, as FlashAttention takes them
"""
