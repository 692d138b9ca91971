"""Checks a model's directory before it is registered: no weights are read, and no torch is needed.

findings           what a check found: refusals and warnings
safetensors_header reads and checks a file's header
weight_files       finds the files that transformers would load, and merges their headers
quantization       recognises methods; says how weights of 8 bits are multiplied out
model_types        what transformers knows of a type: classes, defaults, what cannot run
families           tables of the tensors that known model types have
completeness       compares a checkpoint's tensors with such a table
tokenizer_files, template_syntax   tokenizer.json against the embeddings; the chat template
memory_use         bytes once loaded, and of each token's keys and values
model_weights      all about the weights in one call
"""
