"""What tenants' own servers are told of: events, each stored once.

events        what has happened to which object, and the JSON that is sent
event_outbox  stores an event, whoever notes it and how often
"""
