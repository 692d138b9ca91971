"""The remote engine: a model that another server runs, behind HTTP.

engine        the `Engine`: a thin face over a thread with an event loop
streaming     requests to an OpenAI-compatible server, and how a broken stream goes on
items         requests to an API that takes one input per call
caller        calls, one after another until one succeeds, each when the gate lets it begin
gate          when a call may begin, and how many at once (pure)
breaker       closed, open, half-open (pure)
backoff       how long to wait before a call is made again (pure)
faults        which failures are worth another call (pure)
generation    from what a server streams to tokens and text (pure)
openai        bodies and answers of OpenAI's API, and of vLLM's (pure)
single        bodies and answers of a single-item API (pure)
vectors       embeddings as the token log has them (pure)
upstream      the HTTP client: connections, time limits, bounds
outbox        from the loop's thread to the engine's
metrics       calls as Prometheus metrics
"""
