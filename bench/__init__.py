"""Measurements of the whole: each starts what it measures, prints a table, writes `results/`.

pipeline      what gateway, dispatcher and broker cost around the mock engine
engine_share  how much of an engine's speed is left behind the pipeline
load          `millstream bench` against what is measured
direct        the engine alone, in a process of its own
machine       what was measured on
abuse         idle sockets, clients that do not read, cancels: `idle`, `unread`, `cancels`
peers         their clients, by the thousand
autobahn      the WebSocket against Autobahn's suite, run by `python -m bench.autobahn`
results       runs to medians, a table and a file
engine        our engine beside vLLM, `generate` and transformers' continuous batching
mixed         inter-token times while others' prompts come in, with and without chunked prefill
contenders    what `engine` runs, each in a process of its own
models        models made for measuring
simulate      the scheduler on a virtual clock, run by `python -m bench.simulate`
simulation    its parts
live          isolation, overload and dispatch on a running system
"""
