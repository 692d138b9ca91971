"""Keeps a leader's state equal to the broker's, over crashes, lost messages and new leaders.

leader_failover          restores the last checkpoint, replays the ledger, saves every five seconds
checkpoint               what is saved of the tenants (pure)
in_flight_requests       compares WORK with what is in flight: adopts, ends, removes
queued_requests          compares REQUESTS with what is queued: has the index delivered again
stuck_consumer_detector  notices a consumer that delivers nothing (pure)
requeuer                 takes work back from a worker that does not pull it
departed_consumers       removes the consumers of workers that have left
dead_letters             ends and keeps what has used up its deliveries
"""
