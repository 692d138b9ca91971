"""Events of which tenants' own servers are told, each stored once, and their deliveries.

events            what has happened to which object, and the JSON that is sent
event_outbox      stores an event, whoever notes it and how often
endpoint_store    tenants' endpoints: `endpoint_records` in a bucket
event_cursor      up to which event there are deliveries
delivery_store    one event to one endpoint: `delivery_records` in a bucket
signatures        signs what is sent
"""
