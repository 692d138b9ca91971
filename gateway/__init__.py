"""The gateway, the only room that meets strangers.

HTTP, WebSocket and NATS submissions come in, durable requests go to NATS, and the records of their
token logs go back to the clients.

service          starts and drains the parts
entrypoints/     one file for each kind of client request: the way in and out
beat_sender      sends the gateway's beats: how busy it is
api_key_headers  finds the API key in the headers of a request
context          the parts of one gateway, as the entry points get them
admission/       turns a submission into a durable request
replies/         brings the records of token logs back to their readers
server/          uvicorn's protocols: sockets, limits of connections; below entrypoints and context
page/            static page and its JavaScript client, served under /page/ (no Python)

Of the root's files `settings`, `tenant_labels`, `error_responses`, `api_key_headers` and `metrics`
lie below all these folders, and may be imported by any; `context` lies above admission, replies and
server, `service` above everything.
"""
