"""Continuous batching: waiting sequences come in, the next step's tensors go out.

Nothing here knows a model.

sequence_state    a sequence, its block tables, and the slice of it that one step computes
block_pool        KV blocks of one window: reference counts, prefix cache, eviction     (pure)
kv_cache_manager  the pools of all windows: share a prefix, grow, commit, release       (pure)
scheduler         which sequences run next and how far: priorities, budget, preemption  (pure)
step_inputs       the scheduled slices as tensors: ids, positions, slot mapping, masks  (pure)
varlen_batch      the same slices as FlashAttention takes them: `cu_seqlens`, block table
decode_inputs     decode-only steps in buffers that stay in place, for CUDA graphs
"""
