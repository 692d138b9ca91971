"""Models, versions, adapters, aliases and tenants in NATS KV: what can be served, and for whom.

artifact_verification   hashes a version's files and refuses those that could run code
model_folder            says what a folder is that holds no model, and what it lacks
model_inspection        reads engine, task, lengths and chat template from a model directory
added_tokens            loads a tokeniser with the tokens that tokenizer.json lacks
bert_normalizer         sets case and accents of BERT's tokenisers as transformers does
sentence_encoder        reads modules, prompts and limits of a sentence-transformers directory
classifier              reads a classifier's labels and activation
generation_config       reads a model's own defaults of sampling
chat_templates          finds the chat template in each form in which directories have it
remote_models           makes the record of a model that another server runs
checkpoints/            compares weights and tokeniser with config.json; what they take in memory
lora_inspection         checks a peft adapter against its model, by tensor shapes
models, tenant_records  the records: Model, Version, Adapter, Alias; Tenant, ApiKey
kv_view                 a KV bucket as a live mapping, written by compare-and-set
store, tenants          registry and tenants over such views; services look up here without waiting
"""
