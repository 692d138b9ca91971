"""The vocabulary of Millstream; no file on this floor uses the network, the folders below it do.

subjects            every NATS subject, built and parsed; those of files, batches, responses and
                    webhooks in job_subjects
headers             the envelope: headers of a request and of its work
messages            payloads and records in msgpack: Request, token log records, Heartbeat, Pressure
errors              every error a caller can meet, with its code and HTTP status
topology            streams and consumers as data
delivery_reply      reply subjects of deliveries, parsed
signals             cancel, drain and gone: their bodies, checked before they are obeyed
usage_accounts, prefix_hashes, quota_windows  pure arithmetic that services share
logprob_token_text  texts of tokens that are a part of a character, as OpenAI spells them
base_settings       what the settings of all commands have in common
metrics_server      serves metrics and health checks on a port of their own
server_urls         NATS URLs: addresses, and credentials that nobody is shown
connection_files    paths of credentials and certificates for NATS
grammars/           checks grammars and translates them for llguidance
broker/             talks to NATS; records/ stores; coordination/ elects leaders, lists live
                    members and hears signals
"""
