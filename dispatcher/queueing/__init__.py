"""Queues requests by tenant and decides which is next. Pure; imports `streams` alone.

tenant_state     one tenant's weight, counter, load and demand
tenant_queues    queued requests: a queue per tenant, grouped by priority and wanted version
capacity_shares  which tenants are above their share, and how much is kept free for the others
fair_queue       enqueue, candidates in fair order, reserve, release (virtual token counter)
queue_position   how many tokens are ahead of a tenant's next request
A queued request comes in; candidates and token counts go out.
"""
