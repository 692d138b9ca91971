"""`millstream tenants`: what an operator sees and changes of the tenants, by the admin service.

settings        a tenant's name and limits, and what is wanted of its NATS credentials
commands        add, change and remove one; list prints a table or JSON
producer_files  credentials of a tenant that publishes to NATS, with the `examples` filled in
"""
