"""Delivery of events to tenants' webhook endpoints, by the process that holds the lease.

event_fan_out      makes a delivery for each event and each endpoint that is told of it
delivery_queue     which deliveries are due, endpoint by endpoint
webhook_deliverer  takes what is due, and notes how each attempt went
webhook_call       posts one webhook to an address that was checked
retry_schedule     when the next attempt is
"""
