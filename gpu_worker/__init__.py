"""The worker: pulls requests that fit, runs engines, stores tokens in their logs, drains.

service           `millstream worker`: registers subscriptions, starts one model server per model,
                  drains
settings          the worker's settings, read once
models/           which models are loaded: verify and load, evict, back off
pool/             one model on this worker: pulled work comes in, credit and heartbeats go out
attempt/          one request: claim its log, run it, store every token, store the terminal,
                  acknowledge
engines/          sequences come in, tokens or vectors go out; an engine knows neither NATS nor
                  asyncio
compute_meter, compute_reporter  whose the worker's time was; told to the ledger once a minute
reclaim/          notices of the provider that it takes this machine back
reclaim_watch     asks for them, and starts the drain at the first one
drain_controller  when the worker has to be gone, and the report at the end
identity          the model, version and worker that claims, heartbeats and ledger records name
metrics           finished requests, heartbeats and engine stats for Prometheus

Imports go down only: service, models, pool, attempt, engines.
"""
