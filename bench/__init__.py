"""Measurements of the whole system; not shipped with it.

Each measurement starts what it measures, prints a table and writes `results/`; docs/benchmarks.md
has the figures. `python -m bench NAME` runs one, except where another command is named.

pipeline_cost, throughput_share            what the pipeline costs around an engine
gateway_vs_dynamo, failover_vs_dynamo, dynamo  beside NVIDIA Dynamo
engine_comparison, contenders              our engine beside vLLM and `generate`
engine_alone, chunked_prefill, gpu         our engine by itself
backlog, quota_cost, abusive_clients       dispatcher, quotas and gateway at their limits
autobahn                                   Autobahn's suite (`python -m bench.autobahn`)
live, simulation, simulate                 scheduling: on running processes, and on a virtual clock
bench_command, raw_websockets, synthetic_models, machine_info, reporting, daily_results   what
                                           measurements use
"""
