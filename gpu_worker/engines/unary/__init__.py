"""Engines for work that has one answer per input: what batches it, and what runs.

engine    collects inputs of many requests, runs micro-batches, puts answers together
padding   token ids of several inputs as one tensor with its mask
embed     an encoder or decoder, pooled to vectors
classify  a model with a classification head: probabilities of labels, scores of pairs
pooling   from token states to one vector, and the modules behind it
"""
