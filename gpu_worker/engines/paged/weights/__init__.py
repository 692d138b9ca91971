"""The layers that stand in for transformers' own, and LoRA on them.

A loaded model comes in; the same model with faster layers goes out, and adapters are added to it.

parallel_linear  first: a rank's shards as plain linear layers, row-wise ones with an all-reduce
linear_layers    then: layers of one input merged, on a CPU packed for oneDNN, gated MLPs fused
lora             one adapter: read, checked against the model, added by forward hooks
lora_manager     all adapters: loaded on demand, evicted, and the sequences that wait for them
"""
