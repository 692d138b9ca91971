"""Models, versions, adapters, aliases and tenants in NATS KV: what can be served, and for whom.

artifact_verification   hashes a version's files and refuses those that could run code
model_folder            says what a folder is that holds no model, and what it lacks
model_inspection        reads engine, task, lengths and chat template from a model directory
tokenizer/              what a directory's other files say of its tokeniser: added tokens, templates
sentence_encoder        reads modules, prompts and limits of a sentence-transformers directory
classifier              reads a classifier's labels and activation
generation_config       reads a model's own defaults of sampling
remote_models           makes the record of a model that another server runs
destination_policy      which servers and directories a worker obeys a record for
checkpoints/            compares weights and tokeniser with config.json; what they take in memory
lora_inspection         checks a peft adapter against its model, by tensor shapes
models, tenant_records  the records: Model, Version, Adapter, Alias; Tenant, ApiKey
kv_view                 a KV bucket as a live mapping, written by compare-and-set
price_records           the record of one price, and prices of a million tokens
price_book              numbered prices of models, over such a view
kv_records              a bucket's records by type: what registry, tenants, keys and prices are
store, tenants          registry and tenants over such views; services look up here without waiting
"""
