"""Engines alone under one workload: `python -m bench.contenders.NAME`, each in its own process.

workload              parses the workload, makes its prompts, times the rounds, prints tokens/s
millstream, generate  our engine; transformers' `generate`
vllm, vllm_compiled   vLLM without and with compiled layers
dynamo_worker         no contender: a worker of NVIDIA Dynamo whose tokens cost nothing

A contender may run in an environment without Millstream: those modules import nothing of it.
"""
