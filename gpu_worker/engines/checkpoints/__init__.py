"""Weights as they are stored, and as they are loaded; shared by the engines that run models.

loaded_size     bytes of a model's weights on a device, from headers
dequantization  weights of 8 bits with scales, multiplied out while transformers loads them
"""
