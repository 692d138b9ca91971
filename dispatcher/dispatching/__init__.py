"""Moves requests from REQUESTS to WORK in fair order, and ends those that no worker will.

model_state    what the leader knows: queue, fleet, requests in flight, estimates (pure)
dispatch_loop  selects the next request, publishes it to WORK, then acknowledges it in REQUESTS
terminals      ends requests that are cancelled, late or refused, and acknowledges them
metrics        counts all of this for Prometheus
Queued requests come in; work, terminals and ledger records go out.
"""
