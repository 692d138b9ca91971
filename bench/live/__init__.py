"""Isolation, overload and dispatch, measured on a running system whose parts are processes.

stepped_engine, stepped_worker  the paged engine's own scheduler and KV with modelled step times
cluster, shared_setting         nats-server, dispatcher, gateways, workers: started, metered, ended
traffic             a simulation's arrivals sent to the gateways, and what became of each
isolation           B2: one tenant is loud; weights with all of a tenant's requests at one gateway
overload            B3: more is asked for than can be served
dispatch_latency    B6: how soon an accepted request starts, and what the dispatcher spends on each
"""
