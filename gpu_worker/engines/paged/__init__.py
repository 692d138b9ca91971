"""Continuous batching with a paged KV cache over any Hugging Face causal language model.

engine_loader        a directory comes in: model, KV sized to the memory, `warmup_sequences`, a
                     ready engine
model_loader         reads the weights, refuses what paged attention cannot run, sizes the KV
engine               one step: schedule, execute, report; sequences in, outputs out
generating_sequence  a sequence's text, seed and end; grammar_compiler, penalties change its logits
batch/               which tokens the step computes, and the tensors that say so (no model)
step_executor  the step on all ranks (tensor_parallel, tensor_parallel_rank), then `sampler`
model_runner   one rank's forward pass, eager or by `cuda_graphs`
attention/, weights/   what the model computes with: KV and attention; linear layers and LoRA
"""
