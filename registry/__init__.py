"""Who can serve what, and for whom: models, versions, artifacts and tenants in NATS KV.

models     the records, and which names they may have
artifacts  the files of a version: which are allowed, what they hash to, what they say
adapters   what is served of LoRA adapters, and what is refused
tensors    the shapes in a safetensors file
view       a KV bucket as a live mapping
store      the registry: models, adapters and aliases over the bucket `registry`
tenants    tenants and the hashes of their keys over the bucket `tenants`
commands   `millstream models add|list|show`
"""
