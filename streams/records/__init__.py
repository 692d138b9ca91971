"""What Millstream stores in the broker, in the order in which a request meets it.

usage_counters   reservations on counters of day and month, settled with the ledger record
pending_reservations  those whose request is not known to be queued, for when a process dies
quota_thresholds events: what part of a quota is used, each stored once
request_queue    a gateway enqueues the request; the broker refuses it when the lane is full
attempt_history  how earlier attempts went, and whether the request is poison
token_log        a worker claims the request's log and appends records; another attempt is fenced
log_contents     what the records of a log say together, and how a request ended
token_log_cache  the writer's copy of its log, for readers that missed records
worker_time      what of a worker's time was no request's
ledger_checks    whether a record of the ledger is what its subject says
usage_rollups    the ledger, added up by day
usage_sums, cost_sums  what is added up
dead_letters     work that nobody could finish
files/           tenants' files: records in a bucket, bytes in chunks
cas/             what many processes change: records by compare-and-set
jobs/            batches, and the results of their lines
responses/       stored responses, and what continues them
webhooks/        events that tenants' own servers are told of
answers/         durable answers to NATS producers
stored_ends      which of both a request has; `part_messages` stores what exceeds a message
audit_log        what operators have changed, as the lines of `audit_chain`
"""
