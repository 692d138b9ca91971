"""Republished token-log records come in from NATS; each reader gets every record once, in order.

relay                   the table of log subscriptions: new, resumed, orphaned, cancelled
log_subscription        takes the next record for a reader, or finds that some are missing (pure)
log_cursor              a reader's position in a log, and how much of the output it has had (pure)
subscription_deadlines  when to check a silent log, search a lost one, cancel or give up (pure)
catchup                 reads missed records from the log; `worker_replay` asks its worker first
stored_records          reads what producers have missed, and answers them over NATS
request_lookup          asks who knows of a request that has no log
record_queue            records waiting for an HTTP response
send_buffer             frames waiting to be written to a WebSocket
"""
