"""The remote engine: a model that another server runs, behind HTTP.

engine              the `Engine`: a thread with an event loop, one task per sequence
openai_client       sequences to an OpenAI-compatible server; resumes a broken stream
stream_resumption   whether that continues, replays or fails; drops what is repeated  (pure)
single_item_client  sequences to an API that takes one input per call; group_gate lets them begin
                    by the groups of item_groups (pure)
retrying_caller     each call until one succeeds, with concurrency_limiter, circuit_breaker, backoff
http_client         sends it; `call_errors` says which failures are worth another call
checked_connections connects it to hosts and addresses that the worker's settings allow
openai_protocol, single_item_protocol, embedding_bytes   request bodies and answers  (pure)
output_decoder      stream events to tokens and text                                 (pure)
cross_thread_queue  outputs back to the engine's thread; `metrics` counts calls
"""
