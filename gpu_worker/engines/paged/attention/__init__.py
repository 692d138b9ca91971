"""Paged attention: a layer's query, key and value come in; KV is stored, the output goes out.

paged_attention  the KV tensors of all layers, and the function that transformers calls in each
kernels/         GPU: FlashAttention or Triton, over blocks where they lie
contiguous_kv_copies  CPU, decoding: copies of KV in one piece, while they fit
sdpa                  otherwise: blocks gathered, torch's scaled dot-product attention
"""
