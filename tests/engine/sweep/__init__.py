"""The sweep: every architecture of transformers, tiny and random, served and compared.

tiny_configs  a small configuration of any architecture
causal        causal models through the engine, against `generate`
unary         encoders and rerankers, against transformers and sentence-transformers
report        the table in docs/models.md
"""
