"""Producers for tenants that publish to NATS, which `tenants add --producer DIR` writes into DIR.

Their first lines say which server, tenant and model they are for; the command fills them in.
"""
