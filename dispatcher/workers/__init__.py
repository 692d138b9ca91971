"""Knows the workers of a model: what they have free, what they hold, which are dead.

fleet             heartbeats in, free capacity by priority out
unpulled_work     what was published to WORK and has not been pulled yet
placed_requests   requests in flight by worker, and those that are stranded there
prefix_index      which worker holds which prefixes and adapters, by hash
prefix_routing    the worker a request should go to, or any, and why
failure_detector  asks the broker which late workers are dead (the only file here that does I/O)
Heartbeats and requests come in; free capacity, placements and dead workers go out.
"""
