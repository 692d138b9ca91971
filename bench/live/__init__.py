"""The figures of isolation and overload on a running system: every part a process of its own.

engine     the paged engine's own scheduler and KV, a step model in place of the model
worker     `millstream worker` with that engine
plant      nats-server, dispatcher, gateways and workers: started, ready, metered, ended
traffic    a simulation's load sent to the gateways, and what became of each request
isolation  B2: one tenant is loud; weights with all of a tenant's requests at one gateway
overload   B3: more is asked for than can be served
dispatch   B6: how soon an accepted request starts, and what the dispatcher spends on each
"""
