"""Bodies and frames that strangers may send: strict pydantic records that refuse unknown fields.

Bytes come in; a record goes out, or a `BadRequest` with one sentence about the first wrong field.

payload_element_limit  bounds the parts of a JSON or msgpack payload before it is parsed
parsing                turns bytes into one of these records
websocket_frames       WebSocket frames, and the bodies that NATS producers submit
completions            bodies of /v1/completions and /v1/chat/completions
embeddings             body of /v1/embeddings; `classify_rerank` has those of /v1/classify,
                       /v1/rerank
generation             sampling fields that every generation shares; parts of it are
                       `chat_messages`, `tools` and `structured_outputs`
fields                 types and limits that several records share, and unsupported fields of
                       OpenAI's

A record of a generation has `model`, `prompt` (text or token ids) or `template_messages` (a chat),
`lane_priority`, `deadline_ms` and `to_sampling()`, whichever way it came in.
"""
