"""The API without a server: what clients may send, what they are told, what becomes a request.

A body comes in as bytes and leaves as a validated request; the records of its token log come back
and leave as OpenAI's JSON or as server-sent events. Any service may import this room; it imports
`streams` and `registry` alone.

schemas/          bytes of a body or frame become a pydantic record, or one sentence about its fault
submission/       the record becomes a validated request, and its quotas are reserved
tokenizer         texts become token ids; `chat_template` renders a chat as text before that
content_format    tells whether a chat template takes contents as text or as parts
grammar_checker   refuses grammars that no worker can follow
control_tokens    keeps control tokens that a user wrote as text
tool_calls        finds a model's tool calls in the text that it generates
openai_bodies     records become OpenAI's response bodies; `completion_events` makes events of them
                  for streams
messages/         Anthropic's `/v1/messages`, as a chat in other words
event_ids         number a stream's events, so that a client can go on behind any of them
content_encoding  decodes compressed bodies
error_bodies      errors become JSON fields and retry headers
embedded_server   uvicorn's server without its signal handlers
rate_limiter      so many events a second; `wrong_keys` refuses addresses that try many API keys
"""
