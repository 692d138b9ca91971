"""Who leads and who is alive, by values in a KV bucket that expire unless they are renewed.

lease_bucket  the bucket: in memory, each value lives for one lease
lease         one holder at a time: a process runs `Lease.run` and leads while `is_held`
membership    the live members of a group; calls `on_change` when one comes or goes
A broker connection comes in; leadership and the set of members go out.
"""
