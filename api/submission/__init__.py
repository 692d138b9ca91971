"""A checked body comes in; a request that may be published, with reserved quotas, goes out.

Nothing here queues it.

submission_record   the body as one record, the same for HTTP, WebSocket and NATS
validation          finds model, tokens, grammar and limits; builds the message's headers
request_limits      checks context length, output and inputs; packs the message's payload
quota_checks        which counters a request adds to, and what their totals say (pure)
quotas              adds to the broker's counters, gives back what was not used, settles at the end
open_reservations   the reservations of this gateway that have not ended (pure)
reservation_journal those that are pending, noted before anything is counted
reservation_recovery gives back what a dead process had pending
ledger_space        refuses requests while the ledger has no room for their records
response_space      refuses responses while the stream of results has no room for more
threshold_recorder  stores that a part of a quota is used, once for all gateways
rate_limit_headers  `x-ratelimit-*` headers from the last totals seen (pure)
"""
