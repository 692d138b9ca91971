"""A submission comes in; a ticket goes out, once the broker has stored the request.

offload_thread     parses and hashes large bodies in a thread
preparation_meter  checks and tokenises submissions, and measures how long that takes
client_requests    submits what comes over HTTP or a WebSocket, and subscribes to its replies
producer_requests  submits what producers publish to NATS; `answer_space` has room for their durable
                   answers, and `log_copy` repeats replies for another route
submitter          the one way in for both: claims the idempotency key, sheds load, reserves quotas,
                   and enqueues
idempotency        finds the request that a key stands for
load_shedding      refuses requests whose estimated wait is too long (pure)
refusal_recorder   stores in the ledger how many requests were refused in each second
"""
