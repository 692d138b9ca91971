"""A submission comes in; a ticket goes out, once the broker has stored the request.

offload        parses and hashes large bodies in a thread
submitter      the one way in: validates, claims the idempotency key, sheds load, reserves quotas,
               enqueues, and subscribes to the replies
idempotency    finds the request that a key stands for
load_shedding  refuses requests whose estimated wait is too long (pure)
"""
