"""How a process talks to NATS; only this folder touches the insides of nats-py.

nats_wire                       parses and writes NATS's wire format
nats_client                     nats-py's client with that parser, non-waiting publishes, and
                                cancellation
reconnecting_subscription, reconnecting_client  survive frozen and closed servers, and subscribe
                                again
authentication, refusals        files of credentials and certificates, and why they are refused
inbox, responses                match the broker's responses to the calls that wait for them
store_api                       JetStream's management API, asked in the store that has a stream
broker_client                   `connect()` and `Broker`: publish, store, read; every service starts
                                here
cluster_clock, clock_sync       the shared time, and the samples that keep it right
declaration, stream_reconciler  create streams and consumers, and keep the streams
stream_monitor                  what a process that does not declare streams knows of them
countdown                       time-outs that do not count what the process stood still
pull_loop, retry                pull deliveries, and retry while the broker does not answer
"""
