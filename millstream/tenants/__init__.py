"""`millstream tenants`: what an operator sees and changes of the tenants, by the admin service.

settings  a tenant's name and limits
commands  add, change and remove one; list prints a table or JSON
"""
