"""Checkpoints: model directories read into models of transformers, by every engine with weights.

loading   reads the weights, and refuses a checkpoint that is not whole
"""
