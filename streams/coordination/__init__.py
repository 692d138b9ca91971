"""Leases, membership and signals: who leads, who is alive, who is told at once.

lease_bucket    the KV bucket, in memory: each value expires after one lease unless it is renewed
lease           one holder at a time: a process runs `Lease.run` and leads while `is_held`
membership      the live members of a group; calls `on_change` when one comes or goes
signal_handler  acts on signals (cancel, drain, gone) that were heard, and ignores what is none
heartbeats      workers' heartbeats, checked before they are believed
gateway_beats   the same of gateways: how busy each is
A broker connection comes in; leadership, the set of members and checked signals go out.
"""
