"""Checkpoints: model directories read into models of transformers, by every engine with weights.

loading         reads the weights, and refuses a checkpoint that is not whole
loaded_size     bytes of a model's weights on a device, from headers
dequantization  weights of 8 bits with scales, multiplied out while transformers loads them
"""
