"""Who can serve what, and for whom: models, versions, artifacts and tenants in NATS KV.

models     the records, and which names they may have
artifacts  the files of a version: which are allowed, what they hash to, what they say
view       a KV bucket as a live mapping
store      the registry: models and aliases over the bucket `registry`
tenants    tenants and the hashes of their keys over the bucket `tenants`
commands   `millstream models add|list|show`
"""
