"""A client's request comes in by HTTP, WebSocket or NATS, and becomes a submission for admission.

The records of its token log come back from `gateway.replies` and go out as the client's response.

routes                 paths, health, metrics, error handlers; `openapi` documents them, of parts
                       that `openapi_operations` has for all APIs
http_middleware        request ids, one spelling of paths, CORS
endpoint               one POST path: authenticates, reads and parses the body, serves, answers
choice_fanout          submits the choices of one HTTP request and yields their records
completions            completions and chats, streamed or whole; `messages` in Anthropic's form
embed_classify_rerank  embeddings, classifications and rerankings
websocket              one WebSocket connection; `byte_budget` bounds the frames in submission
websocket_reply        the reply to one request on a WebSocket, frame by frame
plain_responses        JSON, pages of lists, and bodies in pieces
files/                 files of any size: `/v1/files` and `/v1/uploads`
batches/               `/v1/batches`: a file of requests, its state and its results
responses/             `/v1/responses`: stored, streamed, in the background
webhooks/              `/v1/webhook_endpoints`: who is told when something has ended
nats_ingress           pulls a tenant's submissions from its stream
nats_jobs              batches of producers that speak NATS alone
"""
