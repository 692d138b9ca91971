"""What strangers may send: pydantic records with strict types that refuse what they do not know.

    fields          what several of them share: types, limits, and what is not supported yet
    generation      what may be said of any generation
    formats         what an output must look like
    tools           what a model may call
    completions     /v1/completions and /v1/chat/completions
    embeddings      /v1/embeddings
    classification  /v1/classify and /v1/rerank
    frames          the WebSocket's frames, and what NATS producers submit
    bulk            how much a text in JSON or msgpack may hold
    reading         from bytes to one of these records, or to one clear sentence

A record of work to generate has `model`, `prompt` (text or token ids) or `chat` (messages), `lane`
(its priority), `deadline_ms` and `sampling()`, whichever door it came through.
"""
