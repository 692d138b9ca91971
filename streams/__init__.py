"""The vocabulary of Millstream; no file on this floor uses the network, the folders below it do.

subjects       every NATS subject, built and parsed
headers        the envelope: headers of a request and of its work
messages       payloads and records in msgpack: Request, token log records, Heartbeat, Pressure
errors         every error a caller can meet, with its code and HTTP status
topology       streams and consumers as data
usage_accounts, prefix_hashes, quota_windows, grammar   pure arithmetic that services share
settings       settings that all commands share
server_urls    NATS URLs: addresses, and credentials that nobody is shown
broker/        talks to NATS; records/ stores; coordination/ elects leaders and lists live members
"""
