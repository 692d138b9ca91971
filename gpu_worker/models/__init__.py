"""The part of a worker that decides which of its models have an engine, and loads and evicts them.

A model server with work and without an engine comes in; a loaded engine, or a closed one, goes out.

registration    the configured models in the registry; waits for those that are missing
served_models   what the worker has to serve, as registry and records change: adds and removes
model_manager   asks the planner for the next step and does it; backs off from engines that fail;
                ends the process where only a new one helps
model_eviction  the planner: each model's share of memory, which model waits, which makes room
memory_plan     divides the worker's memory over the models that it serves
loading         a registered version becomes an engine: verify, load, warm up, each stage timed
metrics         models that are loaded, and those that could not be, for Prometheus
proof_records   which versions were proven to compute what transformers computes
"""
